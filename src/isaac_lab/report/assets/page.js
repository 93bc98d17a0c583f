"use strict";
// Draws the charts as their controls and the theme say, and filters the two lists. Everything else is HTML.
(function () {
  const root = document.documentElement;
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const views = new Map();

  // Colours are variables of the style sheet, so that charts follow the theme, and the printer, by themselves.
  const muted = "var(--muted)", line = "var(--line)";
  const config = {
    background: null,
    font: getComputedStyle(document.body).fontFamily,
    aria: false, // each chart has a label and a table
    view: { stroke: null },
    axis: {
      labelColor: muted, titleColor: muted, domainColor: line, tickColor: line, gridColor: line,
      labelFontSize: 11, titleFontSize: 12, titleFontWeight: "normal", labelPadding: 4, titlePadding: 8,
    },
    legend: { labelColor: muted, titleColor: muted, labelFontSize: 11, titleFontSize: 11 },
    text: { color: "var(--ink)", fontSize: 11 },
  };
  // Errors only: Vega warns of empty charts, and with no method chosen that is what was asked for.
  const options = { mode: "vega-lite", renderer: "svg", actions: false, logLevel: 1, config, tooltip: { theme: "custom" } };

  // "$name" in a specification is what the controls say, nothing where they say nothing.
  function values(id) {
    const form = document.querySelector(`form[data-charts~="${id}"]`);
    if (!form) return {};
    const chosen = [...form.querySelectorAll("input[type=radio]:checked")].map((input) => JSON.parse(input.dataset.values));
    const shown = [...form.querySelectorAll("input[type=checkbox]:checked")].map((input) => input.value);
    return Object.assign({ rows: "true" }, ...chosen, { shown });
  }

  function specification(id) {
    const own = values(id);
    const text = JSON.stringify(charts[id].spec).replace(/"\$(\w+)"/g, (_, name) => JSON.stringify(name in own ? own[name] : "$"));
    const spec = JSON.parse(text, (_, value) => (value === "$" ? undefined : value));
    return { ...spec, data: { values: charts[id].values }, autosize: { type: "fit-x", contains: "padding" } };
  }

  async function draw(id) {
    const place = document.getElementById(id);
    const turn = (Number(place.dataset.turn) || 0) + 1;
    place.dataset.turn = turn;
    const canvas = document.createElement("div");
    canvas.className = "canvas";
    const before = views.get(id);
    // The old picture stays until the new one is there, so that nothing on the page moves.
    place.append(canvas);
    const result = await vegaEmbed(canvas, specification(id), options);
    if (Number(place.dataset.turn) !== turn) {
      result.finalize();
      canvas.remove();
      return;
    }
    if (before) before.finalize();
    for (const old of [...place.children]) if (old !== canvas) old.remove();
    views.set(id, result);
    place.dataset.drawn = turn;
  }

  async function drawAll() {
    for (const id of Object.keys(charts)) {
      await draw(id);
      await new Promise((done) => setTimeout(done)); // the page stays usable
    }
    root.dataset.drawn = "all";
  }

  for (const form of document.querySelectorAll("form.controls")) {
    const again = () => form.dataset.charts.split(" ").forEach(draw);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", again);
    form.addEventListener("click", (event) => {
      if (!("all" in event.target.dataset)) return;
      for (const box of form.querySelectorAll("input[type=checkbox]")) box.checked = Boolean(event.target.dataset.all);
      again();
    });
  }

  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const press = () => button.setAttribute("aria-pressed", String(dark()));
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("isaac-theme", root.dataset.theme); } catch { /* then it is kept until the page is closed */ }
    press();
  });
  system.addEventListener("change", press);
  press();

  function contains(element, words) {
    const text = element.textContent.toLowerCase();
    return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  }

  const filters = {
    ledger(form) {
      const verdicts = [...form.querySelectorAll("[name=verdict]:checked")].map((box) => box.value);
      const about = form.elements.about.value, text = form.elements.text.value;
      const items = [...document.querySelectorAll("#ledger > li")];
      for (const item of items) {
        item.hidden = !(verdicts.includes(item.dataset.verdict) && (!about || item.dataset.about === about) && contains(item, text));
      }
      return [items, "claims"];
    },
  };
  for (const form of document.querySelectorAll("form[data-filter]")) {
    const apply = () => {
      const [items, what] = filters[form.dataset.filter](form);
      form.querySelector("output").textContent = `${items.filter((item) => !item.hidden).length} of ${items.length} ${what}`;
    };
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", apply);
    apply();
  }

  // A table that is wider than the page says so, until its last column is seen.
  const more = (box) => box.toggleAttribute("data-more", box.scrollWidth - box.clientWidth - box.scrollLeft > 1);
  const sized = new ResizeObserver((entries) => entries.forEach((entry) => more(entry.target)));
  for (const box of document.querySelectorAll(".scroll")) {
    sized.observe(box);
    box.addEventListener("scroll", () => more(box), { passive: true });
  }

  // On paper nothing can be opened: the tests and figures of the ledger are printed, the tables behind charts are not.
  const folded = () => document.querySelectorAll(".ledger details:not([open])");
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...folded()];
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });

  // Where one is on the page.
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.getAttribute("aria-labelledby"))?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -75% 0px" });
  for (const section of document.querySelectorAll("main > section")) seen.observe(section);

  drawAll();
})();
