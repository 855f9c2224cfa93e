# omnitrain on a CPU. Build: docker build -t omnitrain . ; the quickstart: docker run --rm -v "$PWD:/work" omnitrain run quickstart
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends libsndfile1 && rm -rf /var/lib/apt/lists/*
WORKDIR /omnitrain
COPY . .
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir -c constraints.txt '.[quickstart,lora,video,vision,vae,track]'
WORKDIR /work
ENTRYPOINT ["omnitrain"]
