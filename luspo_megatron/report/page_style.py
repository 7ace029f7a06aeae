"""The style sheet of report.html: light and dark, wide screens and phones, print.

Series colours are distinguishable with the common kinds of colour blindness, and lines carry dashes besides.
"""

STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #ffffff; --text: #1b1f24; --soft: #59636e; --line: #d9dee4;
  --grid: #e8ebef; --good: #1a7f37; --bad: #b3261e; --warn-back: #fff6dd; --warn-line: #d4a72c;
  --c0: #0b62b8; --c1: #c2570c; --c2: #0b7a5b; --c3: #8a3fa8; --c4: #a8871c; --c5: #7a828c; 
  --c6: #b3304a; --c7: #3b8f1f; }
@media (prefers-color-scheme: dark) { :root { --back: #0f1318; --card: #181d24; --text: #e4e8ed; --soft: #9aa5b1;
  --line: #2f3741; --grid: #262d36; --good: #57c878; --bad: #ff8b80; --warn-back: #2b2410; --warn-line: #8f7420;
  --c0: #62aef5; --c1: #f59a55; --c2: #4cc9a0; --c3: #cf95ea; --c4: #dfc25a; --c5: #9aa5b1; 
  --c6: #f07f92; --c7: #8fd36f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1400px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 1.5rem; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 32px 0 12px; }
h3 { font-size: .95rem; margin: 0; }
.sub, .note, .unit { color: var(--soft); }
.sub { margin: 0; overflow-wrap: anywhere; }
.unit { font-weight: normal; }
.unit::before { content: "\\00b7\\00a0"; }
.note { font-size: .8rem; margin: 6px 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)); gap: 12px;
  margin: 20px 0 0; padding: 0; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 10px 14px; }
.tile dt { color: var(--soft); font-size: .8rem; }
.tile dd { margin: 0; }
.tile b { display: block; overflow-wrap: anywhere;
  font-size: 1.3rem; line-height: 1.35; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile small { color: var(--soft); font-size: .8rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
.warnings { background: var(--warn-back); border: 1px solid var(--warn-line); border-radius: 8px; padding: 10px 16px;
  margin-top: 20px; overflow-wrap: anywhere; }
.warnings h2 { margin: 0 0 6px; font-size: 1rem; } .warnings ul { margin: 0; padding-left: 20px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 12px 10px; min-width: 0; display: flex; flex-direction: column; }
.chart { width: 100%; height: auto; margin-top: 4px; }
.chart text { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 14px; margin: 2px 0 0; padding: 0; font-size: .8rem;
  color: var(--soft); min-height: 1.3em; }
.legend li { display: flex; align-items: center; gap: 5px; }
.swatch { width: 24px; height: 10px; flex: none; }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); } .s3 { --c: var(--c3); } .s4 { --c: var(--c4); }
.s5 { --c: var(--c5); } .s6 { --c: var(--c6); } .s7 { --c: var(--c7); }
[class^="s"] polyline, [class^="s"] > line, [class^="s"] path, .swatch line {
  stroke: var(--c); stroke-width: 1.8; fill: none;
  stroke-linejoin: round; }
[class^="s"] circle { fill: var(--c); } .band { fill: var(--c); opacity: .18; } .bar { fill: var(--c); }
.hover { fill: transparent; } .hover:hover { fill: var(--soft); opacity: .16; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: 6px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } tr:last-child td { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.number { white-space: normal; }
.card { padding: 4px 6px; overflow-x: auto; }
.share { width: 35%; } .share div { background: var(--c0); height: 10px; border-radius: 2px;
  margin-top: 6px; min-width: 1px; }
.wide { overflow-x: auto; } .plain { margin: 0; padding-left: 20px; overflow-wrap: anywhere; }
p { max-width: 90ch; }
pre { margin: 0; font: 12.5px/1.45 ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.samples pre { max-height: 16em; overflow-y: auto; }
.samples td { min-width: 0; } .samples .text { width: 28%; } .samples .text + .text { width: 58%; }
.pairs td:first-child { color: var(--soft); white-space: nowrap; width: 1%; } .pairs td { overflow-wrap: anywhere; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin-top: 12px; }
summary { cursor: pointer; padding: 10px 14px; font-weight: 600; } details > :not(summary) { padding: 0 14px 12px; }
footer { color: var(--soft); font-size: .8rem; margin-top: 32px; }
@media (max-width: 640px) {
  main { padding: 14px 10px 40px; } .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .samples thead { display: none; } .samples, .samples tbody, .samples tr, .samples td { display: block; width: 100%; }
  .samples tr { border-bottom: 1px solid var(--line); padding: 8px 0; } .samples tr:last-child { border-bottom: 0; }
  .samples td { border: 0; padding: 2px 8px; text-align: left; } .samples .text.text { width: 100%; }
  .samples td::before { content: attr(data-name) " "; color: var(--soft); font-size: .8rem; }
  .share { display: none; } .pairs td:first-child { white-space: normal; width: 34%; }
}
@media print { .charts { grid-template-columns: 1fr 1fr; } figure, .tile { break-inside: avoid; } }
"""
