// One panel of each kind, as Grafana's own panels use these components.

import { getDisplayValueAlignmentFactors, getFieldDisplayValues } from "@grafana/data";
import { BarGauge, BigValue, TimeSeries, VizRepeater } from "@grafana/ui";
import { TableNG } from "@grafana/ui/unstable";

import { BarChart } from "./bars";
import { THEME } from "./looks";
import { marked } from "./marks";

const empty = (frames) => !frames.some((frame) => frame.length > 0);

function NoData({ panel, width, height }) {
  const style = { width, height, display: "grid", placeItems: "center", color: THEME.colors.text.secondary };
  return <div style={{ ...style, fontSize: THEME.typography.h5.fontSize }}>{panel.fieldConfig.defaults.noValue}</div>;
}

const shown = ({ panel, frames, range }) =>
  getFieldDisplayValues({
    data: frames,
    fieldConfig: panel.fieldConfig,
    reduceOptions: panel.options.reduceOptions,
    replaceVariables: (text) => text,
    theme: THEME,
    timeZone: range.timeZone,
  });

function Repeated({ values, width, height, panel, children, ...rest }) {
  return (
    <VizRepeater
      getValues={() => values}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={children}
      renderCounter={0}
      source={values}
      width={width}
      height={height}
      orientation={panel.options.orientation}
      {...rest}
    />
  );
}

function Stat({ width, height, panel, ...data }) {
  const { colorMode, graphMode, justifyMode, textMode, wideLayout } = panel.options;
  return (
    <Repeated values={shown({ panel, ...data })} {...{ width, height, panel }} autoGrid itemSpacing={3}>
      {({ value, count, width, height, alignmentFactors }) => (
        <BigValue
          value={value.display}
          disableWideLayout={!wideLayout}
          theme={THEME}
          {...{ count, width, height, alignmentFactors, colorMode, graphMode, justifyMode, textMode }}
        />
      )}
    </Repeated>
  );
}

function Ranking({ width, height, panel, ...data }) {
  const { displayMode, minVizHeight, minVizWidth, maxVizHeight, namePlacement, showUnfilled, valueMode } = panel.options;
  const limits = { minVizHeight, minVizWidth, maxVizHeight };
  const { text } = panel.options;
  return (
    <Repeated values={shown({ panel, ...data })} {...{ width, height, panel }} itemSpacing={10} {...limits}>
      {({ value, width, height, orientation, alignmentFactors }) => (
        <BarGauge
          value={value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex)}
          valueDisplayMode={valueMode}
          theme={THEME}
          {...{ width, height, text, orientation, alignmentFactors, displayMode, namePlacement, showUnfilled }}
        />
      )}
    </Repeated>
  );
}

function Lines({ width, height, panel, frames, range, marks }) {
  return (
    <TimeSeries
      frames={frames}
      timeRange={range}
      timeZone={range.timeZone}
      legend={panel.options.legend}
      {...{ width, height }}
    >
      {(builder) => marked(builder, marks)}
    </TimeSeries>
  );
}

const Bars = ({ width, height, panel, frames }) => (
  <BarChart frame={frames[0]} options={panel.options} {...{ width, height }} />
);

const Table = ({ width, height, panel, frames, range }) => (
  <TableNG
    data={frames[0]}
    timeRange={range}
    noHeader={!panel.options.showHeader}
    cellHeight={panel.options.cellHeight}
    noValue={panel.fieldConfig.defaults.noValue}
    fieldConfig={panel.fieldConfig}
    enableVirtualization={false}
    {...{ width, height }}
  />
);

const KINDS = { stat: Stat, timeseries: Lines, barchart: Bars, bargauge: Ranking, table: Table };

/** What is inside of a panel's frame. */
export function Inside(props) {
  const Kind = KINDS[props.panel.type];
  return empty(props.frames) && props.panel.type !== "stat" ? <NoData {...props} /> : <Kind {...props} />;
}
