// --- the page

async function start() {
  if (location.protocol === "about:") document.querySelector(".skip").remove(); // in a notebook it would lead there
  const stages = Object.entries(STAGES).map(([stage, text]) =>
    element("li", { class: `swatch-${stage}`, title: text, "data-seen": `.stage-${stage}`, hidden: true }, text.split(":")[0]));
  const touched = element("li", { class: "touched", "data-seen": ".touched:not(.selected, .found)", hidden: true }, "touched by this pass");
  byId("legend").append(...stages, touched, ...["scale", "bar-key"].map((id) => element("li", { id, hidden: true })));
  [viz] = await Promise.all([Viz.instance(), load()]);
  if (data.steps.length === 1) byId("before-caption").after(byId("legend"));
  document.body.classList.toggle("only-before", data.steps.length === 1);
  const all = new View(data.steps.length - 1, () => false);
  if (all.boxes.size <= EXPANDED_UP_TO) state.open = new Set(calls.map((call) => call.name));
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
  openCostliest();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawHeat);
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  byId("details-title").textContent = `This browser cannot draw the page: ${error.message}`;
  throw error;
});
