"""The frame of the report: one HTML page with its style and a few lines of script, which loads nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --tint: #f4f6f8; --link: #0a58a8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --ink: #e4e8ec; --soft: #a3adb8; --line: #39424d; --tint: #1d232a; --link: #7ab8ff;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
header, main, footer { max-width: 76rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .7rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .4rem; overflow-wrap: anywhere; }
p, ul, ol, dl { max-width: 46rem; margin: .4rem 0 .8rem; }
.soft, figcaption, caption, .notes { color: var(--soft); font-size: .875rem; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; border-radius: 2px; }
.skip { position: absolute; left: -99rem; }
.skip:focus { left: 1rem; top: .5rem; background: var(--paper); padding: .3rem .6rem; z-index: 3; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; padding: 0; max-width: none; }
nav a { display: inline-block; padding: .2rem 0; }
code, pre { font: .875em/1.5 ui-monospace, monospace; }
pre { background: var(--tint); border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0; }
code { overflow-wrap: anywhere; }
figure { margin: 1rem 0 1.6rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; min-width: 100%; }
caption { caption-side: bottom; text-align: left; padding: .6rem .75rem; max-width: 60rem; }
th, td { padding: .3rem .75rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child > * { border-bottom-color: var(--line); }
thead th, thead td { background: var(--tint); white-space: nowrap; }
th.number, td.number { text-align: right; white-space: nowrap; }
th[scope=colgroup] { text-align: center; }
th[scope=row] { font-weight: 400; white-space: nowrap; position: sticky; left: 0; background: var(--paper); }
tr.group th { font-style: italic; font-weight: 400; color: var(--soft); background: var(--tint); }
td strong { font-weight: 700; }
td u { text-underline-offset: 3px; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
th button:hover { text-decoration: underline; }
th[aria-sort] button::after { content: " ▾"; }
th[aria-sort=ascending] button::after { content: " ▴"; }
img { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px;
  padding: .4rem; display: block; }
details { margin: .5rem 0; }
summary { cursor: pointer; padding: .2rem 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .8rem; padding: 0;
  list-style: none; max-width: none; }
.cards li { border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem; }
.cards b { display: block; font-size: 1.02rem; overflow-wrap: anywhere; }
.bar { display: inline-block; height: .7em; background: var(--link); border-radius: 2px; min-width: 1px; }
dt { font-weight: 600; }
dd { margin: 0 0 .6rem; }
footer { padding-bottom: 3rem; margin-top: 2rem; }
@media (max-width: 40rem) {
  th[scope=row] { white-space: normal; max-width: 9.5rem; overflow-wrap: anywhere; }
  th, td { padding: .3rem .5rem; }
}
@media print {
  :root { color-scheme: light; --paper: #fff; --ink: #000; --soft: #333; --line: #999; --tint: #f2f2f2; --link: #000; }
  body { font-size: 10pt; }
  nav, .skip { display: none; }
  header, main, footer { max-width: none; padding: 0; }
  .scroll { overflow: visible; border: 0; }
  table { font-size: 7.5pt; }
  th, td { padding: .15rem .3rem; }
  th[scope=row] { position: static; white-space: normal; }
  figure, tr, .cards li { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
"""

_SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.querySelectorAll("thead tr:last-child th")];
  const original = [...table.tBodies].map(body => [body, [...body.rows]]);
  const number = (row, i) => parseFloat(row.cells[i].dataset.value);
  const restore = () => original.forEach(([body, rows]) => { table.append(body); body.append(...rows); });
  heads.forEach((head, i) => {
    const up = head.textContent.includes("\\u2193");
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const first = up ? "ascending" : "descending", second = up ? "descending" : "ascending";
      const next = head.ariaSort === first ? second : head.ariaSort === second ? null : first;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      restore();
      if (!next || i === 0) return;
      head.setAttribute("aria-sort", next);
      const rows = original.flatMap(([, rows]) => rows).filter(row => !row.classList.contains("group"));
      const sign = next === "ascending" ? 1 : -1;
      rows.sort((a, b) => {
        const x = number(a, i), y = number(b, i);
        return isNaN(x) - isNaN(y) || (isNaN(x) ? 0 : sign * (x - y));
      });
      original.forEach(([body]) => body.remove());
      table.append(original[0][0]);
      original[0][0].replaceChildren(...rows);
    });
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));
"""


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        key: its anchor.
        title: its heading.
        body: HTML; "" leaves the section out.
    """

    key: str
    title: str
    body: str


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole document.

    Args:
        title: plain text.
        lead: HTML under the title.
        sections: in order.
    """
    shown = [section for section in sections if section.body]
    links = "".join(f'<li><a href="#{s.key}">{escape(s.title)}</a></li>' for s in shown)
    body = "\n".join(
        f'<section id="{s.key}" aria-labelledby="{s.key}-title">\n<h2 id="{s.key}-title">{escape(s.title)}</h2>\n'
        f"{s.body}\n</section>"
        for s in shown
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header>
<h1>{escape(title)}</h1>
{lead}
<nav aria-label="Contents"><ul>{links}</ul></nav>
</header>
<main id="main">
{body}
</main>
<footer><p class="soft">Made by ood-bench from the run folder alone; this page loads nothing.</p></footer>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def scrolling(table: str, name: str) -> str:
    """The table in a frame that scrolls sideways and can be reached by keyboard."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">{table}</div>'


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """A small table of HTML cells; the first of each row is its head.

    Args:
        heads: plain text.
        rows: HTML.
        name: for the frame.
    """
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    lines = [f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows]
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return scrolling(table, name)
