import { cpSync } from "node:fs";
import { defineConfig } from "vite";

// What Grafana serves beside its scripts and the styles ask for by name: icons, and the typeface.
const FROM = "node_modules/@grafana/ui/dist/public/img";
const FILES = {
  "dist/build/img": FROM,
  "dist/fonts/inter/Inter-Regular.woff2": "node_modules/@fontsource/inter/files/inter-latin-400-normal.woff2",
  "dist/fonts/inter/Inter-Medium.woff2": "node_modules/@fontsource/inter/files/inter-latin-500-normal.woff2",
};

const copied = () => Object.entries(FILES).forEach(([to, from]) => cpSync(from, to, { recursive: true }));

export default defineConfig({
  base: "./",
  // Grafana's components read these two, which webpack provides.
  define: { "process.env.NODE_ENV": '"production"', global: "globalThis" },
  build: { target: "es2022", outDir: "dist/build", modulePreload: false },
  plugins: [{ name: "copied", closeBundle: copied }],
});
