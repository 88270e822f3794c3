// --- bars and colours: what each box of the last graph costs, beside all others

const MEASURES = {
  time: { name: "predicted time", amounts: [TIME] },
  moved: { name: "bytes read and written", amounts: ["bytes read", "bytes written"] },
  sent: { name: "bytes sent", amounts: ["bytes sent"] },
  kept: { name: "bytes in memory", amounts: ["bytes that stay in memory"] },
};

function sumOf(measure, costs) {
  const found = totals(costs);
  return MEASURES[measure].amounts.reduce((sum, name) => sum + (found.get(name) ?? 0), 0);
}

const measured = (measure, value, like = value) => inUnits(value, MEASURES[measure].amounts[0], like);

/** What bars show: the measure that colours show, or else the first that is known; any, if none is. */
const shownMeasure = () => (state.colour === STAGE_COLOURS ? (knownMeasures()[0] ?? "kept") : state.colour);

const knownMeasures = () => Object.keys(MEASURES).filter((each) => sumOf(each, data.costs.nodes) > 0);

/** The costs of all nodes of a box. */
function costsOfBox(box) {
  if (box.nodes[0]?.kind !== "call") return costsOf(box.nodes);
  const { collection } = box.nodes[0];
  return box.collapsed ? data.costs.nodes.filter((node) => node.collection === collection) : [];
}

function fillColours() {
  const options = [[STAGE_COLOURS, "by stage"], ...knownMeasures().map((each) => [each, `by ${MEASURES[each].name}`])];
  byId("colour").append(...options.map(([value, text]) => element("option", { value }, text)));
  on("colour", "change", () => {
    state.colour = byId("colour").value;
    paint();
  });
}

/** Each box that has a cost gets a bar; only the last graph has costs. */
function addBars(view) {
  view.costs = new Map();
  for (const [key, shape] of view.step === data.steps.length - 1 ? view.elements : []) {
    const costs = costsOfBox(view.boxes.get(key));
    if (!costs.length) continue;
    view.costs.set(key, costs);
    const { x, y, width, height } = shape.querySelector("path, polygon").getBBox();
    const place = { x: x + 8, y: y + height - 6, width: width - 16, height: 3, rx: 1.5 };
    shape.append(svgElement("title"), svgElement("rect", { class: "bar", ...place }), svgElement("rect", { class: "bar filled", ...place }));
  }
}

/** Set bars, colours and legend, for the numbers that the user has given. */
function paint() {
  const measure = shownMeasure();
  let largest = 0;
  for (const view of shownViews()) {
    const values = new Map([...view.costs].map(([key, costs]) => [key, sumOf(measure, costs)]));
    const [most, all] = [Math.max(0, ...values.values()), sumOf(measure, data.costs.nodes)];
    largest = Math.max(largest, most);
    for (const [key, shape] of view.elements) {
      const value = values.get(key) ?? 0;
      const share = most ? value / most : 0;
      const told = value ? `${measured(measure, value)}, ${Math.round((100 * value) / all)}% of the ${MEASURES[measure].name}` : "";
      shape.style.setProperty("--share", `${100 * share}%`);
      shape.setAttribute("aria-label", [describe(view.boxes.get(key)), told].filter(Boolean).join(", "));
      if (!values.has(key)) continue;
      const [whole, filled] = shape.querySelectorAll(".bar");
      filled.setAttribute("width", share * whole.width.baseVal.value);
      shape.querySelector("title").textContent = told || `no ${MEASURES[measure].name}`;
    }
    byId(view.side).querySelector("svg").classList.toggle("measured", state.colour !== STAGE_COLOURS && values.size > 0);
  }
  showLegend(measure, largest);
  drawHeat();
}

const isMeasured = () => byId(lastView().side).querySelector("svg.measured") !== null;

/** The legend has the stages and marks that are seen in its graph. */
function showStages() {
  for (const item of byId("legend").querySelectorAll("[data-seen]")) {
    const isMark = item.matches(".touched, .swatch-kept");
    item.hidden = byId(lastView().side).querySelector(item.dataset.seen) === null || (isMeasured() && !isMark);
  }
}

/** What is seen, and what bars and colours stand for. */
function showLegend(measure, largest) {
  showStages();
  byId("scale").hidden = !isMeasured();
  byId("bar-key").hidden = !largest;
  byId("scale").textContent = `colour: 0 to ${measured(measure, largest)}`;
  byId("bar-key").textContent = `bar: ${MEASURES[measure].name}, up to ${measured(measure, largest)}`;
}

/** What is shown at first: the box that costs most, or else the first collection. */
function openCostliest() {
  const view = lastView();
  const costs = [...view.costs].map(([key, of]) => [key, sumOf(shownMeasure(), of)]).sort((one, other) => other[1] - one[1]);
  const [key] = costs.find(([, value]) => value > 0) ?? [...view.boxes].find(([, { call }]) => call) ?? [];
  if (key !== undefined) select(view.side, key);
}
