// What Prometheus answered, as the data frames that Grafana makes of it.

import { FieldType, standardTransformers, standardTransformersRegistry, transformDataFrame } from "@grafana/data";

const transformers = new Map(Object.values(standardTransformers).map((t) => [t.id, t]));
standardTransformersRegistry.setInit(() =>
  [...transformers.values()].map((t) => ({ id: t.id, name: t.name, transformation: async () => t })),
);

// Grafana asks for one minute at least where a target has an interval of one minute.
const STEP = 60_000;

const number = (text) => (text === "NaN" ? NaN : Number(text.replace("Inf", "Infinity")));

const named = (metric, legend) => legend.replace(/{{\s*(\w+)\s*}}/g, (_, label) => metric[label] ?? "");

const time = (values, interval) => ({ name: "Time", type: FieldType.time, config: { interval }, values });

function drawn(target, { metric, values }) {
  const config = target.legendFormat ? { displayNameFromDS: named(metric, target.legendFormat) } : {};
  const numbers = values.map(([, value]) => number(value));
  const value = { name: "Value", type: FieldType.number, config, labels: metric, values: numbers };
  const when = values.map(([at]) => at * 1000);
  return { refId: target.refId, fields: [time(when, target.range ? STEP : undefined), value], length: when.length };
}

function tabled(target, series, many) {
  const labels = [...new Set(series.flatMap(({ metric }) => Object.keys(metric)))].sort();
  const rows = series.flatMap(({ metric, values }) => values.map(([at, value]) => ({ metric, at, value })));
  const columns = labels.map((name) => ({
    name,
    type: FieldType.string,
    config: {},
    values: rows.map(({ metric }) => metric[name] ?? ""),
  }));
  const value = {
    name: many ? `Value #${target.refId}` : "Value",
    type: FieldType.number,
    config: {},
    values: rows.map((row) => number(row.value)),
  };
  const fields = [time(rows.map(({ at }) => at * 1000)), ...columns, value];
  return { refId: target.refId, fields, length: rows.length };
}

/** The frames of a panel, its own transformations done. */
export function framesOf(panel, answers) {
  const many = panel.targets.filter((target) => target.format === "table").length > 1;
  const frames = panel.targets.flatMap((target) => {
    const series = answers[target.refId];
    return target.format === "table" ? [tabled(target, series, many)] : series.map((one) => drawn(target, one));
  });
  return new Promise((done) => transformDataFrame(panel.transformations ?? [], frames).subscribe(done));
}
