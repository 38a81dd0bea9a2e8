// node axe.cjs MODULES PAGE: violations that axe-core finds, and widths at which the page scrolls sideways, as JSON.
const [modules, page_path] = process.argv.slice(2);
const fs = require("fs");
const puppeteer = require(`${modules}/puppeteer-core`);
const axe = fs.readFileSync(`${modules}/axe-core/axe.min.js`, "utf8");

(async () => {
  const found = [];
  const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"], headless: true });
  for (const scheme of ["light", "dark"]) {
    for (const width of [390, 1400]) {
      const page = await browser.newPage();
      const where = `${scheme}, ${width} px`;
      page.on("pageerror", (error) => found.push(`${where}: ${error}`));
      page.on("console", (said) => { if (said.type() === "error") found.push(`${where}: ${said.text()}`); });
      page.on("request", (asked) => { if (!/^(file|data):/.test(asked.url())) found.push(`${where}: asks for ${asked.url()}`); });
      await page.setViewport({ width, height: 900 });
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      await page.goto(`file://${page_path}`);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      if (wide > width) found.push(`${where}: ${wide} px wide`);
      await page.evaluate(() => document.querySelector("svg.chart").dispatchEvent(new MouseEvent("click", { clientX: 300, clientY: 10 })));
      await page.setBypassCSP(true); // axe itself is no part of the page
      await page.reload();
      await page.evaluate(() => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
      await page.evaluate(axe);
      const broken = await page.evaluate(async () => (await window.axe.run()).violations.map((one) => `${one.id}: ${one.nodes[0].html}`));
      found.push(...broken.map((one) => `${where}: ${one}`));
      await page.close();
    }
  }
  await browser.close();
  console.log(JSON.stringify(found));
})();
