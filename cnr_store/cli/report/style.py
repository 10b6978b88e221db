"""How the pages look: light and dark by what the reader's system asks for, and narrow on a phone."""

STYLE = """
:root{--page:#fbfbf9;--card:#fff;--ink:#1d1d1b;--soft:#63635e;--line:#e2e2dc;--a:#2a6fc9;--b:#c8690b;--bad:#b3261e}
@media (prefers-color-scheme:dark){
:root{--page:#161615;--card:#20201e;--ink:#ecece8;--soft:#a5a59e;--line:#3a3a36;--a:#6ea8f0;--b:#e79a4b;--bad:#f2938c}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px}
h1{margin:0;font-size:26px}h2{margin:36px 0 8px;font-size:19px}h3{margin:0;font-size:15px}p{margin:0}
header p,figcaption p,.note,footer,small,.tiles div{color:var(--soft)}
header p,.health,li{overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:12px;margin:20px 0}
.tiles div,figure,.health{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.tiles div{font-size:13px}.tiles b{display:block;font-size:22px;white-space:nowrap;color:var(--ink)}
.bad{color:var(--bad)}.health.bad{border-color:var(--bad)}.health.bad ul{margin:8px 0 0;padding-left:20px}
figure{margin:0 0 16px}figcaption p{font-size:13px}
.plot{display:grid;grid-template-columns:auto 1fr;column-gap:8px;margin-top:12px}
.plot svg{width:100%;height:180px;overflow:visible}
.values{display:flex;flex-direction:column;justify-content:space-between;height:180px;text-align:right}
.values span{line-height:0;font-size:12px;color:var(--soft);white-space:nowrap}
.steps{grid-column:2;display:flex;justify-content:space-between;padding-top:6px;font-size:12px;color:var(--soft)}
.steps{position:relative}.steps span[style]{position:absolute;transform:translateX(-50%)}
.grid{stroke:var(--line);vector-effect:non-scaling-stroke;fill:none}
rect.a,.strip rect{fill:var(--a)}rect.b{fill:var(--b)}
.line{fill:none;stroke-width:2;vector-effect:non-scaling-stroke}.line.a{stroke:var(--a)}.line.b{stroke:var(--b)}
.area{fill:var(--a);fill-opacity:.14}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;margin-top:6px}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
i.a{background:var(--a)}i.b{background:var(--b)}i.faint{background:var(--a);opacity:.1}
.map{display:grid;grid-template-columns:minmax(90px,25%) 1fr auto;gap:6px 10px;align-items:center;margin-top:12px}
.map div{overflow-wrap:anywhere;font-size:13px}.map small{display:block;font-size:11px}
.strip{width:100%;height:24px;background:var(--page);border-radius:3px}
.scroll{overflow-x:auto}.scroll table{min-width:860px}
table{border-collapse:collapse;font-size:13px;width:100%}
th,td{text-align:left;padding:5px 12px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600;white-space:nowrap}td{font-variant-numeric:tabular-nums}
footer,.note{font-size:12px;margin-top:12px}
code{font:0.95em ui-monospace,monospace}a{color:var(--a)}
@media print{body{background:#fff}}
"""
