"""The look of a page: its style sheet for light and dark, and the script of the button that changes between them.

All rules are for what is inside of the class ``omnitrain``, so that a part of a page can be shown in a notebook.
"""

_LIGHT = (
    "--back:#fff;--text:#1c1e21;--soft:#5f656d;--line:#dfe2e6;--link:#0b57a4;"
    "--c0:#0b6bb8;--c1:#c4501b;--c2:#2a8a4a;--c3:#8a4fb0;--c4:#a87900;--c5:#0f8b8d;--c6:#b3325f;--c7:#6b6f76;"
    "--c8:#5460c9;--c9:#7a5c3e"
)
_DARK = (
    "--back:#16181b;--text:#e3e5e8;--soft:#9aa1a9;--line:#34383e;--link:#7db7f0;"
    "--c0:#5aaef0;--c1:#f0925f;--c2:#66c486;--c3:#c193e4;--c4:#dfb84a;--c5:#5cc6c8;--c6:#ee84a8;--c7:#a9aeb6;"
    "--c8:#98a2f5;--c9:#c9a57f"
)

STYLE = f"""
.omnitrain{{color-scheme:light;{_LIGHT}}}
@media (prefers-color-scheme:dark){{.omnitrain:not([data-theme=light]){{color-scheme:dark;{_DARK}}}}}
.omnitrain[data-theme=dark]{{color-scheme:dark;{_DARK}}}
.omnitrain{{
*{{box-sizing:border-box}}
h2{{font-size:1.25rem;margin:2.5rem 0 .75rem;border-bottom:1px solid var(--line);padding-bottom:.25rem}}
h3{{font-size:1rem;margin:1.25rem 0 .5rem}}
a{{color:var(--link)}}
h2 a{{color:inherit;text-decoration:none}}
.note{{color:var(--soft);font-size:.87rem}}
.figures{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,22rem),1fr));gap:1rem}}
figure{{margin:0;min-width:0}}
figure.wide{{margin:.75rem 0;overflow-x:auto}}
figure.wide svg{{min-width:40rem}}
figcaption{{font-weight:600;font-size:.9rem}}
svg{{display:block;width:100%;height:auto;font-family:system-ui,sans-serif}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;font-size:.87rem;margin:.5rem 0}}
th,td{{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-bottom:1px solid var(--line)}}
th{{font-weight:600;color:var(--soft)}}
.number{{text-align:right}}
td.number{{font-variant-numeric:tabular-nums;white-space:nowrap}}
.figures table{{font-size:.8rem}}
.figures th,.figures td{{padding-right:.5rem}}
.figures td:first-child{{overflow-wrap:anywhere;width:100%}}
.swatch{{display:inline-block;width:1rem;border-top:3px solid var(--c);vertical-align:middle;margin-right:.3rem}}
.swatch.d1{{border-top-style:dashed}}.swatch.d2{{border-top-style:dotted}}.swatch.d3{{border-top-style:double}}
pre{{overflow-x:auto;font-size:.82rem;line-height:1.4;border:1px solid var(--line);border-radius:.3rem;padding:.75rem}}
td img{{image-rendering:pixelated;width:6rem;max-width:100%}}
td p{{margin:0 0 .25rem;white-space:pre-wrap;overflow-wrap:anywhere;min-width:7rem;max-width:30rem}}
.sound{{display:inline-block;width:11rem}}
.item .sound{{display:block}}
.sound .spectrogram{{width:100%;height:4rem;image-rendering:auto;display:block}}
audio{{width:100%;height:2rem;display:block}}
.bad{{color:var(--c1);font-weight:600}}
.sample{{border-left:4px solid var(--c);padding-left:.75rem;margin:.75rem 0}}
.sample h4{{font-size:.87rem;margin:0;overflow-wrap:anywhere}}
.sample .note{{margin:0}}
.tokens{{font:.82rem/1.6 ui-monospace,monospace;margin:.25rem 0;white-space:pre-wrap;overflow-wrap:anywhere}}
.tokens b{{background:color-mix(in srgb,var(--c) 30%,transparent);border-bottom:2px solid var(--c)}}
.tokens b.unread{{border:1px dashed var(--c)}}
.tokens b:hover,.tokens span[title]:hover{{outline:1px solid var(--soft)}}
.item{{display:inline-block;vertical-align:top;margin:.1rem;padding:.1rem .3rem;border:1px solid var(--line);
border-radius:.3rem;font-family:system-ui,sans-serif;max-width:100%}}
.item.predicted{{background:color-mix(in srgb,var(--c) 30%,transparent);border-color:var(--c)}}
.item img{{display:block;image-rendering:pixelated;max-width:100%;height:4rem;object-fit:contain;object-position:left}}
}}
"""

PAGE_STYLE = """
body{margin:0;background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif}
header,main{max-width:72rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.5rem}
h1{font-size:1.6rem;margin:0}
nav{display:flex;flex-wrap:wrap;gap:.25rem 1rem;margin:.75rem 0}
button{float:right;font:inherit;color:inherit;background:none;border:1px solid var(--line);border-radius:.3rem;
padding:.15rem .6rem;cursor:pointer}
"""

PART_STYLE = """
div.omnitrain{background:var(--back);color:var(--text);font:14px/1.5 system-ui,sans-serif;padding:.5rem}
"""

SCRIPT = """
document.querySelector("button").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme:dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
"""
