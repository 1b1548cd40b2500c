// Field configuration: defaults, then overrides, as Grafana applies them. Its registry of properties is not published,
// so this one knows those that a dashboard names.

import {
  FieldConfigOptionsRegistry,
  applyFieldOverrides,
  cacheFieldDisplayNames,
  createTheme,
  thresholdsOverrideProcessor,
  valueMappingsOverrideProcessor,
} from "@grafana/data";

export const THEME = createTheme({ colors: { mode: "dark" } });

// What panels have where a dashboard says nothing.
const LINES = {
  drawStyle: "line",
  lineInterpolation: "linear",
  lineWidth: 1,
  fillOpacity: 0,
  pointSize: 5,
  spanNulls: false,
  axisPlacement: "auto",
};
const CUSTOM = { timeseries: LINES, barchart: { lineWidth: 1, fillOpacity: 80, axisPlacement: "auto" } };
const COLOUR = { timeseries: "palette-classic", barchart: "palette-classic" };

const process = { thresholds: thresholdsOverrideProcessor, mappings: valueMappingsOverrideProcessor };

function property(id) {
  const isCustom = id.startsWith("custom.");
  const path = id.replace("custom.", "");
  return { id, path, name: id, isCustom, process: process[id] ?? ((value) => value), shouldApply: () => true };
}

const paths = (custom) => Object.keys(custom ?? {}).map((name) => `custom.${name}`);

/** The frames with the looks that the panel gives to their fields. */
export function looked(panel, frames, timeZone) {
  const defaults = structuredClone(panel.fieldConfig.defaults);
  defaults.color ??= { mode: COLOUR[panel.type] ?? "thresholds" };
  defaults.custom = { ...CUSTOM[panel.type], ...defaults.custom };
  const { overrides } = structuredClone(panel.fieldConfig);
  const ids = overrides.flatMap((override) => override.properties.map(({ id }) => id));
  const registry = new FieldConfigOptionsRegistry();
  for (const id of new Set([...Object.keys(defaults), ...paths(defaults.custom), ...ids])) {
    if (id !== "custom") {
      registry.register(property(id));
    }
  }
  const done = applyFieldOverrides({
    data: frames,
    fieldConfig: { defaults, overrides },
    fieldConfigRegistry: registry,
    replaceVariables: (text) => text,
    theme: THEME,
    timeZone,
  });
  cacheFieldDisplayNames(done);
  return done;
}
