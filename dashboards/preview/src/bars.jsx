// A bar chart on Grafana's chart component. Its bar chart panel is not published, so the place and the width of bars are
// worked out here.

import { FieldType, formattedValueToString, getFieldColorModeForField, getFieldSeriesColor } from "@grafana/data";
import { PlotLegend, UPlotChart, UPlotConfigBuilder, VizLayout } from "@grafana/ui";
import uPlot from "uplot";

import { THEME } from "./looks";

const sum = (values) => values.reduce((all, value) => all + (value ?? 0), 0);

/** For each field where its bars begin and end; group i stands around i. */
function placed(fields, { stacking, barWidth, groupWidth }) {
  if (stacking === "normal") {
    const below = (field, at) => sum(fields.slice(0, field).map(({ values }) => values[at]));
    return fields.map(({ values }, index) => ({
      left: -barWidth / 2,
      size: barWidth,
      from: values.map((_, at) => below(index, at)),
      to: values.map((value, at) => (value === null ? null : below(index, at) + value)),
    }));
  }
  const slot = (fields.length > 1 ? groupWidth : 1) / fields.length;
  return fields.map(({ values }, index) => ({
    left: (index - fields.length / 2 + (1 - barWidth) / 2) * slot,
    size: barWidth * slot,
    from: values.map(() => 0),
    to: values,
  }));
}

function barsOf(bars) {
  const each = (value) => ({ unit: 1, values: (u) => u.data[0].map((x) => value(x)) });
  return uPlot.paths.bars({
    disp: {
      x0: each((x) => x + bars.left),
      size: each(() => bars.size),
      y0: { unit: 1, values: () => bars.from },
      y1: { unit: 1, values: () => bars.to },
    },
  });
}

/** All labels, or every second, or every third: so many that two are ``spacing`` pixels apart. */
function spaced(labels, spacing) {
  return (u) => {
    const every = Math.max(1, Math.ceil((spacing * labels.length * uPlot.pxRatio) / u.bbox.width));
    return [...labels.keys()].filter((index) => index % every === 0);
  };
}

function axes(builder, labels, field, options) {
  const { unit = "short", min, max } = field.config;
  const format = (value, decimals) => formattedValueToString(field.display(value, decimals));
  const across = { scaleKey: "x", isTime: false, theme: THEME };
  builder.addScale({ ...across, orientation: 0, direction: 1, range: () => [-0.5, labels.length - 0.5] });
  builder.addAxis({
    ...across,
    placement: "bottom",
    grid: { show: false },
    ticks: { show: false },
    splits: spaced(labels, options.xTickLabelSpacing),
    values: (_, splits) => splits.map((index) => labels[index]),
  });
  builder.addScale({ scaleKey: unit, orientation: 1, direction: 1, min, max });
  builder.addAxis({ scaleKey: unit, placement: "left", formatValue: format, theme: THEME });
  return unit;
}

function chart(frame, fields, options) {
  const builder = new UPlotConfigBuilder("utc");
  const labels = frame.fields[0].values.map(String);
  const scaleKey = axes(builder, labels, fields[0], options);
  const places = placed(fields, options);
  fields.forEach((field, index) => {
    const { lineWidth, fillOpacity } = field.config.custom;
    builder.addSeries({
      scaleKey,
      lineWidth,
      fillOpacity,
      lineColor: getFieldSeriesColor(field, THEME).color,
      colorMode: getFieldColorModeForField(field),
      pathBuilder: barsOf(places[index]),
      pxAlign: true,
      theme: THEME,
      dataFrameFieldIndex: { fieldIndex: frame.fields.indexOf(field), frameIndex: 0 },
    });
  });
  builder.setPrepData(() => [[...labels.keys()], ...places.map(({ to }) => to)]);
  return builder;
}

/** The chart and its legend. */
export function BarChart({ frame, options, width, height }) {
  const fields = frame.fields.filter((field) => field.type === FieldType.number);
  const builder = chart(frame, fields, options);
  const legend = options.legend.showLegend ? <PlotLegend data={[frame]} config={builder} {...options.legend} /> : null;
  return (
    <VizLayout width={width} height={height} legend={legend}>
      {(w, h) => <UPlotChart config={builder} data={builder.prepData([frame])} width={w} height={h} />}
    </VizLayout>
  );
}
