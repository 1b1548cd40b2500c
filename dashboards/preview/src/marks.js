// Annotations in charts: where an alert fired. Grafana's plugin for them is not published; this draws the same marks.

import { THEME } from "./looks";

const COLOUR = THEME.visualization.getColorByName("red");

function draw(u, { from, to }) {
  const [left, right] = [from, to].map((when) => Math.round(u.valToPos(when, "x", true)));
  const { top, height } = u.bbox;
  u.ctx.save();
  u.ctx.globalAlpha = 0.1;
  u.ctx.fillStyle = COLOUR;
  u.ctx.fillRect(left, top, right - left, height);
  u.ctx.globalAlpha = 1;
  u.ctx.fillRect(left, top + height, right - left, 5);
  u.ctx.strokeStyle = COLOUR;
  u.ctx.lineWidth = 1;
  u.ctx.setLineDash([3, 3]);
  u.ctx.beginPath();
  for (const x of [left, right]) {
    u.ctx.moveTo(x + 0.5, top);
    u.ctx.lineTo(x + 0.5, top + height);
  }
  u.ctx.stroke();
  u.ctx.restore();
}

/** Lets a chart draw them. */
export function marked(builder, marks) {
  builder.addHook("draw", (u) => marks.forEach((mark) => draw(u, mark)));
  return null;
}
