// --- drawing

function describe(box) {
  const [node] = box.nodes;
  const parts = [box.lines.filter(Boolean).join(", ").replace(/[▸▾] /g, "")];
  if (box.nodes.length === 1 && node.kind !== "call") {
    if (node.shape) parts.push(`shape ${node.shape}`);
    parts.push(node.name);
  }
  if (box.collapsed) parts.push("collapsed");
  return parts.join(", ");
}

/** Draw the graphs of a step on one side. */
function draw(side, step) {
  const [view, canvas] = [new View(step, (call) => !state.open.has(call.name)), byId(side)];
  const svg = viz.renderSVGElement(view.input(canvas.clientWidth / canvas.clientHeight || 1));
  views[side] = view;
  for (const title of svg.querySelectorAll("title")) {
    title.parentNode.dataset.title = title.textContent;
    title.remove();
  }
  for (const text of svg.querySelectorAll("g.label")) text.setAttribute("class", "edge label");
  svg.querySelector("g.graph").append(...svg.querySelectorAll("g.cluster > text")); // above arrows, which cross them
  svg.removeAttribute("xmlns:xlink");
  svg.setAttribute("aria-hidden", "false");
  svg.setAttribute("role", "presentation");
  const inPixels = (name) => parseFloat(svg.getAttribute(name)) * (4 / 3);
  Object.assign(view, { side, width: inPixels("width"), height: inPixels("height"), elements: new Map() });
  for (const shape of svg.querySelectorAll("g.node")) {
    const box = view.boxes.get(view.order[Number(shape.dataset.title.slice("box".length))]);
    shape.setAttribute("role", "button");
    shape.setAttribute("aria-label", describe(box));
    shape.setAttribute("tabindex", view.elements.size ? "-1" : "0");
    shape.classList.toggle("touched", box.nodes.some((node) => step > BEFORE && node.passes?.at(-1) === data.steps[step]));
    shape.addEventListener("click", () => select(side, box.key));
    shape.addEventListener("keydown", (event) => onKey(event, view, box));
    view.elements.set(box.key, shape);
  }
  for (const shape of svg.querySelectorAll("g.cluster, g.edge, g.graph > text, g.graph > polygon")) shape.setAttribute("aria-hidden", "true");
  canvas.replaceChildren(svg);
  addBars(view);
  mark();
  state.isFitted ? fit() : resize(side);
}

const lastView = () => views.after ?? views.before;

function mark() {
  for (const view of Object.values(views)) {
    for (const [key, shape] of view?.elements ?? []) {
      shape.classList.toggle("selected", key === state.selected);
      shape.setAttribute("aria-pressed", String(key === state.selected));
      shape.classList.toggle("found", state.found.has(key));
    }
  }
  showStages();
}

function redraw() {
  draw("before", BEFORE);
  if (data.steps.length > 1) {
    const [name, last] = [data.steps[state.step], data.steps.length - 1];
    draw("after", state.step);
    byId("after-caption").textContent =
      state.step === BEFORE ? "Before the first pass" : `After ${name}${state.step === last ? ", the last pass" : ""}`;
    byId("step").value = state.step;
    byId("step").setAttribute("aria-valuetext", `${name}, step ${state.step} of ${last}`);
    byId("step-name").textContent = `${name} (${state.step} of ${last})`;
    byId("step-back").disabled = state.step === 0;
    byId("step-on").disabled = state.step === last;
  }
  paint();
  listNodes();
  markFound();
}

function goTo(step) {
  state.step = Math.min(Math.max(step, 0), data.steps.length - 1);
  redraw();
  const modified = data.collections.filter((one) => one.steps.some((each) => each.name === data.steps[state.step] && each.modified));
  byId("status").textContent =
    state.step === BEFORE ? "" : `${data.steps[state.step]} changed ${counted(modified.length, "collection")}.`;
}

// --- collapsing

function toggleCall(call, open) {
  if (open) state.open.add(call.name);
  else state.open.delete(call.name);
  redraw();
  const view = lastView();
  const key = view.boxes.has(call.name) ? call.name : [...view.boxes.values()].find((box) => box.call === call)?.key;
  if (key !== undefined) {
    focusBox(view, key);
    if (!open) select(view.side, key);
  }
}

function openAll(open) {
  state.open = new Set(open ? calls.map((call) => call.name) : []);
  redraw();
}

