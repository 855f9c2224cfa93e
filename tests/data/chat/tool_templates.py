# ruff: noqa: RUF001
"""Chat templates with tools in the styles of six families, and one that says itself what is trained.

Each is our own text around the tokens of its family. ``TURNS`` finds what the assistant writes from the rendered text
alone, by these tokens: the first group of each match.
"""

HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content or not message.tool_calls %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function is defined %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{#- The tools go into the system message -#}
<|start_header_id|>system<|end_header_id|>

{% if tools is not none %}
Functions, as JSON:
{% for tool in tools %}
{{ tool | tojson(indent=4) }}
{% endfor %}
{% endif %}
{{- system }}<|eot_id|>
{%- for message in rest %}
    {%- if 'tool_calls' in message and message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- if message.content %}{{- message.content | trim }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '<|python_tag|>{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}{{- '}' }}
        {%- endfor %}
        {{- '<|eom_id|>' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """
{%- if messages[0].role == 'system' %}
    {%- set opening, turns = messages[0].content + '\\n\\n', messages[1:] %}
{%- else %}
    {%- set opening, turns = '', messages %}
{%- endif %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == asked[-1] %}
            {{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (opening if message == asked[-1] else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {%- if message.content %}
            {{- ' ' + message.content }}
        {%- endif %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set written = call.function | tojson %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids of calls have nine characters') }}
            {%- endif %}
            {{- written[:-1] + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('no such role') }}
    {%- endif %}
{%- endfor %}
"""

DEEPSEEK = """
{%- set ns = namespace(after_tool=false, system='') -%}
{%- for message in messages -%}{%- if message.role == 'system' -%}{%- set ns.system = message.content -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}{{- ns.system -}}
{%- for tool in tools or [] -%}{{- '\\n## ' + tool.function.name + '\\n' + tool.function.description -}}{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set ns.after_tool = false -%}
        {{- '<｜User｜>' + message.content + '<｜Assistant｜>' -}}
    {%- elif message.role == 'assistant' -%}
        {%- if ns.after_tool -%}{{- '<｜tool▁outputs▁end｜>' -}}{%- set ns.after_tool = false -%}{%- endif -%}
        {{- message.content -}}
        {%- if message.tool_calls -%}
            {{- '<｜tool▁calls▁begin｜>' -}}
            {%- for call in message.tool_calls -%}
                {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' -}}
                {{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' -}}
            {%- endfor -%}
            {{- '<｜tool▁calls▁end｜>' -}}
        {%- endif -%}
        {{- '<｜end▁of▁sentence｜>' -}}
    {%- elif message.role == 'tool' -%}
        {%- if not ns.after_tool -%}{{- '<｜tool▁outputs▁begin｜>' -}}{%- set ns.after_tool = true -%}{%- endif -%}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if ns.after_tool -%}{{- '<｜tool▁outputs▁end｜>' -}}{%- endif -%}
"""

GEMMA = """
{%- macro say(content) -%}
    {%- if content is string -%}
        {{- content | trim -}}
    {%- else -%}
        {%- for part in content or [] -%}
            {%- if part.type == 'image' -%}<start_of_image>{%- else -%}{{- part.text | trim -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools -%}
    {{- '<start_of_turn>developer\\n' -}}
    {%- for tool in tools -%}
        {{- '<start_function_declaration>' + tool.function.name + ':' + tool.function.description -}}
        {{- '<end_function_declaration>' -}}
    {%- endfor -%}
    {{- '<end_of_turn>\\n' -}}
{%- endif -%}
{%- set ns = namespace(before='') -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<start_function_response>response:' + message.name + '{' + say(message.content) + '}' -}}
        {{- '<end_function_response>' -}}
        {%- set ns.before = 'tool' -%}
        {%- continue -%}
    {%- endif -%}
    {%- if ns.before != 'tool' -%}
        {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
    {%- endif -%}
    {{- say(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '<start_function_call>call:' + call.function.name + '{' -}}
        {%- for key, value in call.function.arguments | dictsort -%}
            {{- key + ':' -}}{{- '<escape>' + value + '<escape>' if value is string else value -}}
            {%- if not loop.last -%},{%- endif -%}
        {%- endfor -%}
        {{- '}<end_function_call>' -}}
    {%- else -%}
        {{- '<end_of_turn>\\n' -}}
    {%- endfor -%}
    {%- set ns.before = 'calls' if message.tool_calls else message.role -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.before != 'tool' -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_question=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role in ['user', 'system'] %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set why = '' %}
        {%- if message.reasoning_content is string %}
            {%- set why = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set why = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_question and (loop.last or why) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + why.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

TAGGED = """
{%- for tool in tools or [] %}{{ tool.function.name }};{% endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
        {{- '<|im_end|>' }}
        {%- endgeneration -%}
        {{- '\\n' }}
    {%- else -%}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

TEMPLATES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "gemma": GEMMA,
    "qwen3": QWEN3,
}
TURNS = {
    "hermes": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
    "llama": r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?(?:<\|eot_id\|>|<\|eom_id\|>))",
    "mistral": r"(?:\[/INST\]|\[/TOOL_RESULTS\])(?!\[TOOL_RESULTS\])(.*?</s>)",
    "deepseek": r"(?:<｜Assistant｜>|<｜tool▁outputs▁end｜>)(.*?<｜end▁of▁sentence｜>)",
    "gemma": r"(?:<start_of_turn>model\n|<end_function_response>(?!<start_function_response>))"
    r"((?:(?!<end_of_turn>|<start_function_response>).)*(?:<end_of_turn>)?)",
    "qwen3": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
}
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁sep｜>"),
    *(f"<｜tool▁{what}▁{edge}｜>" for what in ("calls", "call", "outputs", "output") for edge in ("begin", "end")),
    *("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<escape>"),
    *(f"<{edge}_function_{what}>" for what in ("declaration", "call", "response") for edge in ("start", "end")),
]
