// A dashboard on Grafana's grid: ?page=NAME draws that of data.json and sets window.drawn when it is done.

import { ThemeContext, dateTime } from "@grafana/data";
import { GlobalStyles, Icon, PanelChrome, ToolbarButton } from "@grafana/ui";
import { flushSync } from "react-dom";
import { createRoot } from "react-dom/client";

import { framesOf } from "./frames";
import { THEME, looked } from "./looks";
import { Inside } from "./panels";

const { colors, typography } = THEME;

/** Where a panel stands, in pixels. */
function placed({ x, y, w, h }, { columns, cell, gap, edge, head }) {
  const column = (window.innerWidth - 2 * edge - (columns - 1) * gap) / columns;
  return {
    position: "absolute",
    left: Math.round(edge + x * (column + gap)),
    top: head + y * (cell + gap),
    width: Math.round(w * column + (w - 1) * gap),
    height: h * cell + (h - 1) * gap,
  };
}

function Row({ panel, place }) {
  return (
    <div style={{ ...place, display: "flex", alignItems: "center", gap: 8 }}>
      <Icon name={panel.collapsed ? "angle-right" : "angle-down"} />
      <span style={typography.h5}>{panel.title}</span>
      {panel.collapsed && <span style={{ color: colors.text.secondary }}>({panel.panels.length} panels)</span>}
    </div>
  );
}

function Panel({ panel, place, ...data }) {
  const { title, description, type } = panel;
  const { width, height } = place;
  return (
    <div style={place}>
      <PanelChrome padding={type === "table" ? "none" : "md"} {...{ title, description, width, height }}>
        {(w, h) => <Inside panel={panel} width={w} height={h} {...data} />}
      </PanelChrome>
    </div>
  );
}

function Head({ dashboard, chosen, range, grid }) {
  const bar = { display: "flex", alignItems: "center", gap: 8, padding: `0 ${grid.edge}px`, height: grid.head / 2 };
  const box = { border: `1px solid ${colors.border.medium}`, borderRadius: 4, padding: "5px 8px" };
  return (
    <>
      <div style={bar}>
        <span style={{ ...typography.h4, flex: 1 }}>{dashboard.title}</span>
        <ToolbarButton icon="clock-nine">{range.text}</ToolbarButton>
        <ToolbarButton icon="sync">{dashboard.refresh}</ToolbarButton>
      </div>
      <div style={bar}>
        {Object.entries(chosen).map(([label, value]) => (
          <div key={label} style={{ display: "flex" }}>
            <span style={{ ...box, background: colors.background.secondary }}>{label}</span>
            <span style={{ ...box, background: THEME.components.input.background }}>{value}</span>
          </div>
        ))}
      </div>
    </>
  );
}

const Themed = ({ children }) => (
  <ThemeContext.Provider value={THEME}>
    <GlobalStyles />
    {children}
  </ThemeContext.Provider>
);

function Dashboard({ dashboard, grid, range, frames, alerts, chosen }) {
  const marked = new Set(dashboard.annotations.list[0].filter.ids);
  return (
    <>
      <Head {...{ dashboard, chosen, range, grid }} />
      {dashboard.panels.map((panel) => {
        const place = placed(panel.gridPos, grid);
        const data = { frames: frames[panel.id], range, marks: marked.has(panel.id) ? alerts : [] };
        const Part = panel.type === "row" ? Row : Panel;
        return <Part key={panel.id} {...{ panel, place }} {...data} />;
      })}
    </>
  );
}

/** Charts and icons come in steps, each after a look at the page: it is done when nothing has changed for a second. */
function settled() {
  return new Promise((done) => {
    let timer = setTimeout(done, 1000);
    new MutationObserver(() => {
      clearTimeout(timer);
      timer = setTimeout(done, 1000);
    }).observe(document.body, { attributes: true, childList: true, subtree: true });
  });
}

const upright = ({ family, style }) => family.includes("Inter") && style === "normal";

async function main() {
  const pages = await (await fetch("data.json")).json();
  const { answers, from, to, range: text, ...page } = pages[new URLSearchParams(location.search).get("page")];
  const range = { from: dateTime(from), to: dateTime(to), raw: { from: "now-1h", to: "now" }, timeZone: "utc", text };
  const frames = {};
  for (const panel of page.dashboard.panels.filter(({ type }) => type !== "row")) {
    frames[panel.id] = looked(panel, await framesOf(panel, answers[panel.id]), range.timeZone);
  }
  const root = createRoot(document.getElementById("root"));
  flushSync(() => root.render(<Themed />));
  // Charts measure text and draw it once, so its typeface has to be there before them.
  await Promise.all([...document.fonts].filter(upright).map((face) => face.load()));
  const dashboard = <Dashboard {...page} {...{ range, frames }} />;
  flushSync(() => root.render(<Themed>{dashboard}</Themed>));
  await settled();
  window.drawn = true;
}

main();
