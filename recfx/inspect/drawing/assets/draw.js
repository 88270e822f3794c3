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

function draw(side, step) {
  const view = new View(step, (call) => !state.open.has(call.name));
  views[side] = view;
  const canvas = byId(side);
  const svg = viz.renderSVGElement(view.input(canvas.clientWidth / canvas.clientHeight || 1));
  for (const title of svg.querySelectorAll("title")) {
    title.parentNode.dataset.title = title.textContent;
    title.remove();
  }
  for (const text of svg.querySelectorAll("g.label")) text.setAttribute("class", "edge label");
  svg.querySelector("g.graph").append(...svg.querySelectorAll("g.cluster > text")); // above arrows, which cross them
  svg.removeAttribute("xmlns:xlink");
  svg.setAttribute("aria-hidden", "false");
  svg.setAttribute("role", "presentation");
  view.width = parseFloat(svg.getAttribute("width")) * (4 / 3);
  view.height = parseFloat(svg.getAttribute("height")) * (4 / 3);
  view.elements = new Map();
  view.side = side;
  let first = true;
  for (const shape of svg.querySelectorAll("g.node")) {
    const box = view.boxes.get(view.order[Number(shape.dataset.title.slice("box".length))]);
    view.elements.set(box.key, shape);
    shape.setAttribute("role", "button");
    shape.setAttribute("aria-label", describe(box));
    shape.setAttribute("tabindex", first ? "0" : "-1");
    first = false;
    shape.classList.toggle("touched", box.nodes.some((node) => step > BEFORE && lastPass(node) === data.steps[step]));
    shape.addEventListener("click", () => select(side, box.key));
    shape.addEventListener("dblclick", () => toggle(box));
    shape.addEventListener("keydown", (event) => onKey(event, view, box));
  }
  for (const shape of svg.querySelectorAll("g.cluster, g.edge, g.graph > text, g.graph > polygon")) shape.setAttribute("aria-hidden", "true");
  canvas.replaceChildren(svg);
  addBars(view, svg);
  mark();
  state.isFitted ? fit() : resize(side);
}

const lastPass = (node) => (node.passes ?? []).at(-1);

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
  const name = data.steps[state.step];
  draw("before", BEFORE);
  if (data.steps.length > 1) {
    draw("after", state.step);
    const last = state.step === data.steps.length - 1;
    const title = state.step === BEFORE ? "Before the first pass" : `After ${name}${last ? ", the last pass" : ""}`;
    byId("after-caption").textContent = title;
    byId("step").value = state.step;
    byId("step").setAttribute("aria-valuetext", `${name}, step ${state.step} of ${data.steps.length - 1}`);
    byId("step-name").textContent = `${name} (${state.step} of ${data.steps.length - 1})`;
    byId("step-back").disabled = state.step === 0;
    byId("step-on").disabled = last;
  }
  paint();
  listNodes();
}

function goTo(step) {
  state.step = Math.min(Math.max(step, 0), data.steps.length - 1);
  redraw();
  markFound();
  const modified = data.collections.filter((one) => one.steps.some((each) => each.name === data.steps[state.step] && each.modified));
  byId("status").textContent =
    state.step === BEFORE ? "" : `${data.steps[state.step]} changed ${counted(modified.length, "collection")}.`;
}

// --- collapsing

function toggleCall(call, open) {
  if (open) state.open.add(call.name);
  else state.open.delete(call.name);
  redraw();
  markFound();
  const view = views.after?.boxes ? views.after : views.before;
  const key = view.boxes.has(call.name) ? call.name : [...view.boxes.values()].find((box) => box.call === call)?.key;
  if (key !== undefined) {
    focusBox(view, key);
    if (!open) select(view.side, key);
  }
}

function toggle(box) {
  if (box.call && box.nodes.length <= 1 && collectionOf(box.call).steps.length) toggleCall(box.call, !state.open.has(box.call.name));
}

function openAll(open) {
  state.open = new Set(open ? calls.map((call) => call.name) : []);
  redraw();
  markFound();
}

