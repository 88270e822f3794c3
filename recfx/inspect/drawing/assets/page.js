// --- the page

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", String(dark));
  if (data) drawHeat();
}

async function start() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  setTheme(system.matches);
  system.addEventListener("change", (event) => setTheme(event.matches));
  on("theme", "click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  const stages = Object.entries(STAGES).map(([stage, text]) =>
    element("li", { class: `swatch-${stage}`, title: text, "data-seen": `.stage-${stage}`, hidden: true }, text.split(":")[0]));
  const touched = element("li", { class: "touched", "data-seen": ".touched:not(.selected, .found)", hidden: true }, "touched by this pass");
  byId("legend").append(...stages, touched, ...["scale", "bar-key"].map((id) => element("li", { id, hidden: true })));
  [viz] = await Promise.all([Viz.instance(), load()]);
  if (data.steps.length === 1) byId("before-caption").after(byId("legend"));
  document.body.classList.toggle("only-before", data.steps.length === 1);
  const all = new View(data.steps.length - 1, () => false);
  if (all.boxes.size <= data.expandedUpTo) state.open = new Set(calls.map((call) => call.name));
  byId("step").max = data.steps.length - 1;
  on("step", "input", () => goTo(Number(byId("step").value)));
  on("step-back", "click", () => goTo(state.step - 1));
  on("step-on", "click", () => goTo(state.step + 1));
  on("search", "input", search);
  on("expand-all", "click", () => openAll(true));
  on("collapse-all", "click", () => openAll(false));
  document.addEventListener("keydown", onAnyKey);
  document.body.classList.toggle("no-cost", data.costs.nodes.length === 0);
  [given.batch, given.lengths] = [data.costs.B, readLengths(data.costs.lengths)[0]];
  byId("batch").value = data.costs.B;
  byId("length").value = data.costs.lengths;
  byId("length-example").textContent = `${data.costs.L}, ${data.costs.features.at(-1)}=50`;
  byId("ranks").textContent = data.costs.W > 1 ? `W = ${data.costs.W} ranks` : "";
  for (const name of ["batch", "length"]) on(name, "input", priceAgain);
  fillColours();
  startRanks();
  redraw();
  priceAgain();
  startSizes();
  fit(); // now that all that is around the graphs has its size
  byId("details-title").textContent = "Nothing selected";
  if (!follow()) openCostliest();
  addEventListener("hashchange", follow);
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  byId("details-title").textContent = `This browser cannot draw the page: ${error.message}`;
  throw error;
});
