// Opens a built page and takes its picture: node draw.mjs CHROMIUM PICTURE QUERY WIDTH HEIGHT
// It fails where the page is not drawn, says anything else on its console, has an error, or asks for what is not there.

import puppeteer from "puppeteer-core";
import { preview } from "vite";

const [executablePath, path, query, width, height] = process.argv.slice(2);
const options = { build: { outDir: "dist" }, preview: { host: "127.0.0.1", port: 0 }, logLevel: "error" };
const server = await preview(options);
const args = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-partial-raster"];
const browser = await puppeteer.launch({ executablePath, args });
try {
  const page = await browser.newPage();
  const said = [];
  page.on("console", (message) => said.push(message.text()));
  page.on("pageerror", (error) => said.push(error.stack));
  page.on("requestfailed", (request) => said.push(request.url()));
  page.on("response", (response) => response.ok() || said.push(response.url()));
  await page.setViewport({ width: Number(width), height: Number(height) });
  await page.goto(`http://127.0.0.1:${server.httpServer.address().port}/build/${query}`);
  await page.waitForFunction("window.drawn", { timeout: 60_000 }).catch((error) => said.push(error.message));
  await page.waitForNetworkIdle();
  if (said.length > 0) {
    throw new Error(`${path} was not drawn: ${said.join("\n")}`);
  }
  await page.screenshot({ path });
} finally {
  await browser.close();
  await server.close();
}
