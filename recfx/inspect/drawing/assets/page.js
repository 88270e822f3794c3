"use strict";

// The page of recfx.draw. `data` has the facts, Graphviz (the global Viz) places boxes and arrows, and this script joins
// the two. All names are the user's, so they are only ever set as text, never as markup.

const STAGES = {
  select: "select: which ids",
  hash: "hash: ids to rows",
  dist: "dist: between ranks",
  lookup: "lookup: rows, pooled",
  dense: "dense: everything else",
  io: "input and output",
};
const MOST_RESULTS = 40;
const MOST_TABLES = 100;
const TIME = "predicted time"; // the name of the amount that is in seconds
const BEFORE = 0;
const READABLE = 0.65; // the least zoom at which text can be read

const byId = (id) => document.getElementById(id);
let data = null; // the facts
let viz = null; // Graphviz
const state = {
  step: 0,
  open: new Set(), // calls whose collection is not collapsed
  unstacked: new Set(), // stacks that are drawn one by one
  selected: null, // the key of a box
  found: new Set(), // keys of boxes that the search has found
  zoom: { before: 1, after: 1 },
};
const views = { before: null, after: null };

// --- elements

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function button(text, action, attributes = {}) {
  return element("button", { type: "button", onclick: action, ...attributes }, text);
}

function counted(number, word) {
  return `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
}

// --- facts

let outer = []; // the nodes around the collections, and their calls
let calls = [];

/** The data is compressed JSON; `fetch` would ask the network. */
async function load() {
  const packed = Uint8Array.from(atob(byId("data").textContent.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  data = JSON.parse(await new Response(stream).text());
  outer = data.outer.map((place) => data.nodes[place]);
  calls = outer.filter((node) => node.kind === "call");
  state.step = data.steps.length - 1;
}

// --- costs

/** What the formulas are evaluated for: the batch size, and the mean length of each feature. */
const given = { batch: 1, lengths: [] };
let reshow = () => {}; // shows again what is selected, with other numbers

/** The number that a formula stands for; null if it is not known. */
function evaluate(formula) {
  if (formula === null || typeof formula === "number") return formula;
  if (formula === "B") return given.batch;
  if (formula === "W") return data.costs.W;
  const [operation, ...rest] = formula;
  if (operation === "L") return given.lengths[rest[0]];
  const values = rest.map(evaluate);
  if (operation === "+") return values.reduce((left, right) => left + right, 0);
  if (operation === "*") return values.reduce((left, right) => left * right, 1);
  if (operation === "/") return values[0] / values[1];
  if (operation === "^") return values[0] ** values[1];
  return operation === "min" ? Math.min(...values) : Math.max(...values);
}

/** The sums of what some nodes cost, by the name of the amount. */
function totals(nodes) {
  const found = new Map();
  for (const node of nodes) {
    for (const [name, , formula] of node.amounts) {
      const value = evaluate(formula);
      found.set(name, value === null || found.get(name) === null ? null : (found.get(name) ?? 0) + value);
    }
  }
  return found;
}

/** A number in a unit that fits it, as recfx.cost prints it. */
function inUnits(value, name) {
  if (value === null) return "?";
  if (name === TIME) {
    if (value >= 1) return `${value.toFixed(2)} s`;
    return value >= 1e-3 ? `${(1e3 * value).toFixed(2)} ms` : `${(1e6 * value).toFixed(1)} µs`;
  }
  const bytes = name.startsWith("bytes");
  let unit = "";
  for (const larger of ["K", "M", "G", "T"]) {
    if (value < 1000) break;
    value /= 1000;
    unit = larger;
  }
  const shown = unit ? value.toFixed(2) : String(Math.round(value * 100) / 100);
  return bytes ? `${shown} ${unit}B` : unit ? `${shown} ${unit}` : shown;
}

const exactly = (value) => (value === null ? "" : value.toLocaleString("en", { maximumFractionDigits: 6 }));

/** A table of amounts; `texts` has the expressions, for a single node. */
function costTable(title, amounts, texts = new Map()) {
  if (amounts.size === 0) return [];
  const columns = ["per step", "number", ...(texts.size ? ["expression"] : [])];
  const rows = [...amounts].map(([name, value]) =>
    element("tr", {},
      element("th", { scope: "row" }, name),
      element("td", { class: "number", title: exactly(value) }, inUnits(value, name)),
      texts.size ? element("td", {}, code(texts.get(name))) : null));
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  return [
    element("h3", {}, title),
    element("table", { class: "cost" }, element("thead", {}, head), element("tbody", {}, ...rows)),
  ];
}

const costsOf = (nodes) => nodes.filter((node) => node.cost !== undefined).map((node) => data.costs.nodes[node.cost]);

/** "2", or "1, watched=50": the mean length of each feature; or what is wrong. */
function readLengths(text) {
  const { features } = data.costs;
  const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
  let rest = data.costs.L;
  const named = new Map();
  for (const part of parts) {
    const at = part.lastIndexOf("=");
    const feature = part.slice(0, Math.max(at, 0)).trim();
    const number = part.slice(at + 1).trim();
    const value = Number(number);
    if (!number || !Number.isFinite(value) || value < 0) return [null, `“${part}” has no number that is at least 0`];
    if (at < 0) rest = value;
    else if (features.includes(feature)) named.set(feature, value);
    else return [null, `there is no feature “${feature}”`];
  }
  return [features.map((feature) => named.get(feature) ?? rest), ""];
}

function priceAgain() {
  const batch = Number(byId("batch").value);
  const [lengths, wrong] = readLengths(byId("length").value);
  const complaints = [];
  if (!Number.isInteger(batch) || batch < 1) complaints.push("B is a whole number above 0");
  if (wrong) complaints.push(wrong);
  byId("batch").setAttribute("aria-invalid", String(!Number.isInteger(batch) || batch < 1));
  byId("length").setAttribute("aria-invalid", String(Boolean(wrong)));
  if (complaints.length) {
    byId("cost-total").textContent = `${complaints.join("; ")}.`;
    return;
  }
  [given.batch, given.lengths] = [batch, lengths];
  const { hardware, noTimes, W } = data.costs;
  const what = (name) => (name === TIME ? ` predicted on ${hardware}` : name.replace(/^bytes/, ""));
  const found = [...totals(data.costs.nodes)].map(([name, value]) => inUnits(value, name) + what(name));
  const step = data.costs.trains ? "training step" : "step in eval mode";
  const onRank = W > 1 ? `, on this rank${hardware ? ", without waiting for others" : ""}` : "";
  byId("cost-total").textContent = `One ${step} of the whole model${onRank}: ${found.join(", ")}. ${noTimes}`.trim();
  reshow();
}

const collectionOf = (call) => data.collections[call.collection];
const labelOf = (collection) => collection.paths[0] || "(root)";

/** The graph of a collection after a step: after its own last pass up to then; null before the first. */
function stepOf(collection, step) {
  const done = new Set(data.steps.slice(0, step + 1));
  return collection.steps.filter((each) => done.has(each.name)).at(-1) ?? null;
}

function innerNodes(found) {
  return found.nodes.map((place) => data.nodes[place]);
}

const isLone = (call) => !call.inputs && !outer.some((node) => (node.inputs ?? []).includes(call.name));

function shortLine(node) {
  if (node.kind === "input") return node.name;
  if (node.kind === "output") return "output";
  const called = (node.line ?? "").split(" = ").slice(1).join(" = ").split("(")[0];
  return called.replace(/^call_\w+\[(.*)\]$/, "$1") || node.name;
}

function itemLabel(item, collection) {
  const prefix = collection.prefix;
  return item.name.startsWith(prefix) ? item.name.slice(prefix.length) : item.name;
}

/** Nodes of the model that do alike things with the same inputs, such as to take out one feature each, by stack. */
function outerStacks() {
  const groups = new Map();
  for (const node of outer) {
    if (node.kind !== "dense") continue;
    const key = [shortLine(node).replace(/'[^']*'|\d+/g, ""), ...(node.inputs ?? [])].join(" ");
    groups.set(key, [...(groups.get(key) ?? []), node]);
  }
  const stacked = [...groups].filter(([key, nodes]) => nodes.length >= data.stackFrom && !state.unstacked.has(key));
  return new Map(stacked.flatMap(([key, nodes]) => nodes.map((node) => [node, key])));
}

// --- views: the boxes and arrows of a step

class View {
  constructor(step, collapse) {
    this.step = step;
    this.boxes = new Map(); // by key: { key, lines, stage, call, nodes, collection }
    this.arrows = new Map();
    this.clusters = new Map();
    this.lone = []; // the first and the last box of each open collection that no arrow reaches
    this.takers = new Map();
    this.givers = new Map();
    this.collapse = collapse;
    const stacks = outerStacks();
    for (const node of outer) {
      if (node.kind === "call") this.addCall(node);
      else if (stacks.has(node)) this.addToStack(stacks.get(node), node);
      else this.add({ key: node.name, lines: [shortLine(node)], stage: node.stage, nodes: [node] });
    }
    for (const node of outer) {
      for (const source of node.inputs ?? []) {
        const [tail, label] = this.givers.get(source) ?? [source, ""];
        for (const head of this.takers.get(node.name) ?? [node.name]) this.arrow(tail, head, label);
      }
    }
  }

  add(box) {
    this.boxes.set(box.key, box);
  }

  arrow(tail, head, label) {
    if (!this.boxes.has(tail) || !this.boxes.has(head)) return;
    const key = `${tail}\n${head}`;
    if (!this.arrows.has(key)) this.arrows.set(key, { tail, head, label });
  }

  addToStack(key, node) {
    this.givers.set(node.name, [key, ""]);
    this.takers.set(node.name, [key]);
    const known = this.boxes.get(key);
    if (known) known.nodes.push(node);
    else this.add({ key, lines: [""], stage: node.stage, nodes: [node] });
    const { nodes, lines } = this.boxes.get(key);
    lines[0] = `▸ ${nodes.length.toLocaleString("en")} x ${shortLine(nodes[0])}`;
  }

  addCall(call) {
    const collection = collectionOf(call);
    const found = stepOf(collection, this.step);
    if (found === null || found.nodes.length === 0 || this.collapse(call)) {
      const lines = [labelOf(collection), counted(collection.tables.length, "table")];
      if (found === null) lines.unshift(collection.was);
      else lines.push(`▸ ${counted(innerNodes(found).filter((node) => node.kind !== "item").length, "node")}`);
      this.add({ key: call.name, lines, stage: "lookup", nodes: [call], call, collapsed: found !== null });
      this.givers.set(call.name, [call.name, collection.shape]);
      return;
    }
    this.clusters.set(call.name, `▾ ${labelOf(collection)}`);
    this.addNodes(call, collection, found);
  }

  addNodes(call, collection, found) {
    const nodes = innerNodes(found).filter((node) => node.kind !== "item");
    const items = new Map(innerNodes(found).filter((node) => node.kind === "item").map((node) => [node.name, node]));
    const keys = this.stacks(call, nodes);
    for (const node of nodes) {
      const key = keys.get(node.name);
      const known = this.boxes.get(key);
      if (known) {
        known.nodes.push(node);
        known.lines[0] = `▸ ${known.nodes.length.toLocaleString("en")} x ${node.kind}`;
        known.lines[1] = node.kernel ? `kernel ${node.kernel}` : "";
        continue;
      }
      const lines = [node.kind, counted((node.tables ?? []).length, "table"), node.kernel ? `kernel ${node.kernel}` : ""];
      this.add({ key, lines, stage: node.stage, nodes: [node], call });
    }
    const lone = isLone(call);
    const entry = `${call.name}/ input`;
    if (lone) this.add({ key: entry, lines: ["features"], stage: "io", nodes: [], call });
    const shapes = new Map(nodes.map((node) => [node.name, node.shape ?? ""]));
    const takers = new Set();
    for (const node of nodes) {
      for (const given of node.inputs ?? []) {
        const item = items.get(given);
        const source = item ? item.inputs[0] : given;
        if (source === found.input) {
          takers.add(keys.get(node.name));
          if (lone) this.arrow(entry, keys.get(node.name), "");
        } else {
          this.arrow(keys.get(source), keys.get(node.name), item ? itemLabel(item, collection) : shapes.get(source));
        }
      }
    }
    this.takers.set(call.name, [...takers]);
    const giver = keys.get(found.giver);
    if (giver === undefined) return;
    this.givers.set(call.name, [giver, shapes.get(found.giver)]);
    if (lone) {
      this.add({ key: `${call.name}/ output`, lines: [collection.gives], stage: "io", nodes: [], call });
      this.arrow(giver, `${call.name}/ output`, shapes.get(found.giver));
      this.lone.push([entry, `${call.name}/ output`]);
    }
  }

  /** The key of each node's box: many like nodes share one, unless the user wants to see them one by one. */
  stacks(call, nodes) {
    const groups = new Map();
    for (const node of nodes) {
      const group = `${call.name}/${node.kind} ${node.kernel ?? ""}`;
      groups.set(group, [...(groups.get(group) ?? []), node.name]);
    }
    const keys = new Map();
    for (const [group, names] of groups) {
      const stacked = names.length >= data.stackFrom && !state.unstacked.has(group);
      for (const name of names) keys.set(name, stacked ? group : `${call.name}/${name}`);
    }
    return keys;
  }

  /** What Graphviz is given. */
  input() {
    this.order = [...this.boxes.keys()]; // names of the user's would come back from Graphviz as something else
    const names = new Map(this.order.map((key, place) => [key, `box${place}`]));
    const node = (box) => ({
      name: names.get(box.key),
      attributes: { label: box.lines.filter(Boolean).map(label).join("\n"), class: `stage-${box.stage}` },
    });
    const inside = new Map([...this.clusters.keys()].map((call) => [call, []]));
    const free = [];
    for (const box of this.boxes.values()) (this.clusters.has(box.call?.name) ? inside.get(box.call.name) : free).push(box);
    const edges = [...this.arrows.values()].map((each) => ({
      tail: names.get(each.tail),
      head: names.get(each.head),
      attributes: each.label ? { label: ` ${label(each.label)} ` } : {},
    }));
    return {
      directed: true,
      graphAttributes: { bgcolor: "transparent", nodesep: 0.25, ranksep: 0.4, rankdir: "TB", fontname: "Helvetica" },
      nodeAttributes: { shape: "box", style: "rounded,filled", fontname: "Helvetica", fontsize: 12, margin: "0.12,0.06" },
      edgeAttributes: { fontname: "Helvetica", fontsize: 10, arrowsize: 0.7 },
      nodes: free.map(node),
      edges: [...edges, ...this.columns(free, edges, names)],
      subgraphs: [...inside].map(([call, boxes], position) => ({
        name: `cluster_${position}`,
        graphAttributes: { label: label(this.clusters.get(call)), style: "rounded,dashed", fontname: "Helvetica", fontsize: 12 },
        nodes: boxes.map(node),
      })),
    };
  }

  /** What no arrow reaches would all stand side by side: invisible arrows put it into columns. */
  columns(free, edges, names) {
    const reached = new Set(edges.flatMap((edge) => [edge.tail, edge.head]));
    const boxes = free.map((box) => names.get(box.key)).filter((name) => !reached.has(name)).map((name) => [name, name]);
    const clusters = this.lone.map((pair) => pair.map((key) => names.get(key)));
    return [[boxes, 3], [clusters, 0.4]].flatMap(([alone, height]) => {
      const across = Math.max(2, Math.round(Math.sqrt(alone.length / height)));
      return alone.slice(across).map(([head], place) => ({ tail: alone[place][1], head, attributes: { style: "invis" } }));
    });
  }
}

/** A text as Graphviz takes it, to which backslashes and entities are escapes; names that are longer than a box should be are cut. */
function label(text) {
  const letters = [...text];
  const shown = letters.length <= data.longest ? text : `${letters.slice(0, data.longest - 10).join("")}…${letters.slice(-9).join("")}`;
  return shown.replace(/\\/g, "\\\\").replace(/&(?=#?\w+;)/g, "&amp;");
}

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
  const svg = viz.renderSVGElement(view.input());
  svg.querySelectorAll("title").forEach((title) => (title.parentNode.dataset.title = title.textContent));
  svg.querySelectorAll("title").forEach((title) => title.remove());
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
  for (const shape of svg.querySelectorAll("g.cluster, g.edge, g.graph > polygon")) shape.setAttribute("aria-hidden", "true");
  canvas.replaceChildren(svg);
  mark();
  resize(side);
}

function lastPass(node) {
  return (node.passes ?? []).at(-1);
}

function resize(side) {
  const view = views[side];
  const svg = byId(side).querySelector("svg");
  if (!svg) return;
  svg.setAttribute("width", view.width * state.zoom[side]);
  svg.setAttribute("height", view.height * state.zoom[side]);
}

function mark() {
  for (const view of Object.values(views)) {
    for (const [key, shape] of view?.elements ?? []) {
      shape.classList.toggle("selected", key === state.selected);
      shape.setAttribute("aria-pressed", String(key === state.selected));
      shape.classList.toggle("found", state.found.has(key));
    }
  }
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

// --- keyboard

function onKey(event, view, box) {
  const go = { ArrowDown: "next", ArrowUp: "previous", ArrowLeft: "left", ArrowRight: "right" }[event.key];
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    select(view.side, box.key);
    byId("details").focus();
  } else if (go) {
    event.preventDefault();
    const target = neighbour(view, box.key, go);
    if (target !== undefined) focusBox(view, target);
  }
}

/** Down and up: the nearest box along an arrow, or else any in that direction. Left and right: the nearest one. */
function neighbour(view, key, direction) {
  const centre = (other) => {
    const { x, y, width, height } = view.elements.get(other).getBBox();
    return [x + width / 2, y + height / 2];
  };
  const [x, y] = centre(key);
  const vertical = direction === "next" || direction === "previous";
  const sign = direction === "next" || direction === "right" ? 1 : -1;
  let best;
  let least = Infinity;
  for (const other of view.elements.keys()) {
    const [otherX, otherY] = centre(other);
    const ahead = sign * (vertical ? otherY - y : otherX - x);
    const aside = Math.abs(vertical ? otherX - x : otherY - y);
    if (other === key || ahead < 1) continue;
    const linked = view.arrows.has(`${key}\n${other}`) || view.arrows.has(`${other}\n${key}`);
    const distance = vertical ? 8 * ahead + aside - (linked ? 1e6 : 0) : ahead + 4 * aside;
    if (distance < least) [best, least] = [other, distance];
  }
  return best;
}

function focusBox(view, key) {
  for (const shape of view.elements.values()) shape.setAttribute("tabindex", "-1");
  const shape = view.elements.get(key);
  shape.setAttribute("tabindex", "0");
  shape.focus();
  shape.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// --- details

let origin = null;

function select(side, key) {
  state.selected = key;
  origin = { side, key };
  mark();
  const box = views[side].boxes.get(key);
  const body = byId("details-body");
  if (box.nodes.length === 0) show(box.lines[0], []);
  else if (box.nodes.length > 1) showStack(box);
  else if (box.nodes[0].kind === "call") showCollection(box.nodes[0], box);
  else showNode(box.nodes[0], box.call);
  byId("details").scrollTop = 0;
  return body;
}

function show(title, parts) {
  byId("details-title").textContent = title;
  byId("details-body").replaceChildren(...parts);
}

function facts(pairs) {
  const list = element("dl");
  for (const [name, value] of pairs) {
    if (value === "" || value === undefined || value === null || value.length === 0) continue;
    const shown = Array.isArray(value) ? element("ul", {}, ...value.map((each) => element("li", {}, each))) : value;
    list.append(element("dt", {}, name), element("dd", {}, shown));
  }
  return list;
}

const code = (text) => (text ? element("code", {}, text) : "");

function showNode(node, call) {
  reshow = () => showNode(node, call);
  const collection = call ? collectionOf(call) : null;
  const tables = collection ? (node.tables ?? []).map((place) => collection.tables[place]).filter(Boolean) : [];
  show(node.name, [
    facts([
      ["kind", node.kind],
      ["stage", STAGES[node.stage]],
      ["source", code(node.source || collection?.sources[0])],
      ["collection", collection ? code(labelOf(collection)) : ""],
      ["touched by", (node.passes ?? []).join(" → ")],
      ["shape", code(node.shape)],
      ["bytes", code(node.bytes)],
      ["type", node.dtype],
      ["device", node.device],
      ["kernel", node.kernel],
      ["why", node.why],
      ["sends", node.collectives],
    ]),
    ...costTable("Cost", totals(costsOf([node])), new Map(costsOf([node]).flatMap((cost) => cost.amounts))),
    facts([
      ["text", code(node.line)],
      ["inputs", (node.inputs ?? []).slice(0, 12).map(code)],
    ]),
    ...(call ? [button("Collapse its collection", () => toggleCall(call, false))] : []),
    ...tableList(tables),
  ]);
}

function showStack(box) {
  reshow = () => showStack(box);
  const [first] = box.nodes;
  const group = box.key;
  const collection = box.call ? collectionOf(box.call) : null;
  show(`${counted(box.nodes.length, "node")}: ${collection ? first.kind : shortLine(first)}`, [
    facts([
      ["kind", first.kind],
      ["stage", STAGES[first.stage]],
      ["source", code(first.source || collection?.sources[0])],
      ["collection", collection ? code(labelOf(collection)) : ""],
      ["kernel", first.kernel],
    ]),
    ...costTable("Cost of all of them", totals(costsOf(box.nodes))),
    button("Draw them one by one", () => {
      state.unstacked.add(group);
      redraw();
    }),
    ...(collection ? [button("Collapse their collection", () => toggleCall(box.call, false))] : []),
    element(
      "ul",
      {},
      ...box.nodes.slice(0, MOST_TABLES).map((node) => element("li", {}, button(node.name, () => showNode(node, box.call)))),
      box.nodes.length > MOST_TABLES ? element("li", {}, `and ${counted(box.nodes.length - MOST_TABLES, "more")}`) : null,
    ),
  ]);
}

function showCollection(call, box) {
  reshow = () => showCollection(call, box);
  const collection = collectionOf(call);
  const opened = state.open.has(call.name);
  const found = stepOf(collection, state.step);
  show(labelOf(collection), [
    facts([
      ["class", code(collection.kind)],
      ["before", collection.was === collection.kind ? "" : code(collection.was)],
      ["status", collection.status],
      ["why", collection.why],
      ["names", collection.paths.length > 1 ? collection.paths.map(code) : ""],
      ["source", call.source ? code(call.source) : collection.sources.map(code)],
      ["device", collection.device],
      ["gives", code(collection.shape)],
      ["tables", collection.tables.length.toLocaleString("en")],
      ["passes", collection.steps.filter((step) => step.modified).map((step) => step.name).join(" → ")],
      ["declined", found === null ? "" : found.declined.slice(0, 20)],
    ]),
    ...costTable("Cost", totals(data.costs.nodes.filter((node) => data.collections[node.collection] === collection))),
    ...(collection.steps.length ? [button(opened ? "Collapse" : "Expand", () => toggleCall(call, !opened))] : []),
    ...tableList(collection.tables),
  ]);
}

function tableList(tables, limit = MOST_TABLES) {
  if (tables.length === 0) return [];
  const columns = ["table", "features", "rows", "dim", "pooling", "type", "hashing"];
  const wanted = byId("search").value.trim().toLowerCase();
  const hit = ([name, features]) => wanted && [name, ...features].some((each) => each.toLowerCase().includes(wanted));
  const shown = [...tables.filter(hit), ...tables.filter((table) => !hit(table))].slice(0, limit);
  const rows = shown.map((table) => {
    const [name, features, rows, dim, pooling, type, hashing] = table;
    const cells = [name, features.join(", "), rows.toLocaleString("en"), String(dim), pooling, type, hashing];
    return element("tr", { class: hit(table) ? "found" : false }, ...cells.map((cell) => element("td", {}, cell)));
  });
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  const parts = [
    element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Tables" },
      element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))),
  ];
  if (tables.length > limit) {
    const more = button(`Show all ${tables.length.toLocaleString("en")} tables`, () => {
      parts.forEach((part) => part !== more && part.remove());
      more.replaceWith(...tableList(tables, Infinity));
    });
    parts.push(more);
  }
  return parts;
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

// --- search

function matches(text) {
  const found = [];
  for (const call of calls) {
    const collection = collectionOf(call);
    const where = labelOf(collection);
    if (collection.paths.some((path) => path.toLowerCase().includes(text))) found.push({ label: `collection ${where}`, call });
    collection.tables.forEach((table, place) => {
      const [name, features] = table;
      const feature = features.find((each) => each.toLowerCase().includes(text));
      if (name.toLowerCase().includes(text)) found.push({ label: `table ${name} in ${where}`, call, table: place });
      else if (feature) found.push({ label: `feature ${feature}: table ${name} in ${where}`, call, table: place });
    });
    const step = stepOf(collection, state.step);
    for (const node of step === null ? [] : innerNodes(step)) {
      if (node.kind !== "item" && node.name.toLowerCase().includes(text)) found.push({ label: `node ${node.name}`, call, node });
    }
  }
  for (const node of outer) {
    if (node.kind !== "call" && node.name.toLowerCase().includes(text)) found.push({ label: `node ${node.name}`, node });
  }
  return found;
}

function search() {
  const text = byId("search").value.trim().toLowerCase();
  const found = text ? matches(text) : [];
  const more = found.length - MOST_RESULTS;
  byId("search-count").textContent = !text ? "" : found.length ? `${counted(found.length, "match").replace(/matchs$/, "matches")}` : "Nothing found";
  byId("results").replaceChildren(
    ...found.slice(0, MOST_RESULTS).map((each) => element("li", {}, button(each.label, () => reveal(each)))),
    ...(more > 0 ? [element("li", { class: "quiet" }, `and ${more.toLocaleString("en")} more`)] : []),
  );
  markFound();
}

function markFound() {
  const text = byId("search").value.trim().toLowerCase();
  const found = text ? matches(text).slice(0, 1000) : [];
  state.found = new Set(found.flatMap((each) => keysOf(views.after ?? views.before, each)));
  mark();
}

/** The boxes that show what was found. */
function keysOf(view, { call, table, node }) {
  if (call && view.boxes.has(call.name)) return [call.name];
  return [...view.boxes.values()]
    .filter((box) => (node ? box.nodes.includes(node) : box.call === call && (table === undefined || holds(box, table))))
    .map((box) => box.key);
}

function holds(box, table) {
  return box.nodes.some((node) => node.stage === "lookup" && (node.tables ?? []).includes(table));
}

function reveal(match) {
  const { call, table, node } = match;
  byId("results").replaceChildren(); // until something else is typed
  if (call && collectionOf(call).steps.length && state.step > BEFORE && !state.open.has(call.name)) {
    state.open.add(call.name);
    redraw();
    markFound();
  }
  const view = views.after ?? views.before;
  const [key] = keysOf(view, match);
  if (key === undefined) return;
  select(view.side, key);
  const box = view.boxes.get(key);
  if (box.nodes.length > 1) {
    const one = box.nodes.find((each) => (node ? each === node : (each.tables ?? []).includes(table)));
    if (one) showNode(one, box.call);
  }
  focusBox(view, key);
}

// --- the same as text

function listNodes() {
  const parts = [];
  const around = outer.filter((node) => node.kind !== "call");
  if (around.length) parts.push(nodeTable("the model around the collections", around, null, calls.length === 0));
  for (const call of calls) {
    const collection = collectionOf(call);
    const found = stepOf(collection, state.step);
    const nodes = found === null ? [] : innerNodes(found).filter((node) => node.kind !== "item");
    const title = `${labelOf(collection)}: ${counted(collection.tables.length, "table")}, ${found === null ? collection.status : counted(nodes.length, "node")}`;
    parts.push(nodeTable(title, nodes.length ? nodes : [call], call, calls.length <= 3));
  }
  byId("list").replaceChildren(...parts);
}

function nodeTable(title, nodes, call, open) {
  const made = element("details", { open: open }, element("summary", {}, title));
  const fill = () => {
    if (made.childElementCount > 1) return;
    const columns = ["node", "stage", "kind", "takes", "shape", "kernel", "tables", "source"];
    const rows = nodes.map((node) => {
      const opens = button(node.name, () => {
        node.kind === "call" ? showCollection(node) : showNode(node, call);
        byId("details").focus();
      });
      const cells = [node.stage, node.kind, (node.inputs ?? []).slice(0, 6).join(", "), node.shape, node.kernel];
      const count = node.tables ? String(node.tables.length) : "";
      return element("tr", {}, element("td", {}, opens), ...[...cells, count, node.source].map((cell) => element("td", {}, cell ?? "")));
    });
    const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
    made.append(element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": title },
      element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))));
  };
  if (open) fill();
  made.addEventListener("toggle", () => made.open && fill());
  return made;
}

// --- the page

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", String(dark));
}

const shownViews = () => Object.values(views).filter((view) => view !== null);

function zoomBy(factor) {
  for (const { side } of shownViews()) {
    state.zoom[side] = Math.min(Math.max(state.zoom[side] * factor, 0.1), 4);
    resize(side);
  }
}

/** Show whole graphs, unless that would make them smaller than `least`. */
function fit(least) {
  for (const { side, width, height } of shownViews()) {
    const { clientWidth, clientHeight } = byId(side);
    const room = Math.min((clientWidth - 16) / width, (clientHeight - 16) / height);
    state.zoom[side] = Math.min(Math.max(room, least), 1);
    resize(side);
  }
}

async function start() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  setTheme(system.matches);
  system.addEventListener("change", (event) => setTheme(event.matches));
  byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  const legend = Object.entries(STAGES).map(([stage, text]) => element("li", { class: `swatch-${stage}`, title: text }, text.split(":")[0]));
  byId("legend").append(...legend, element("li", { class: "touched" }, "touched by this pass"));
  [viz] = await Promise.all([Viz.instance(), load()]);
  document.querySelector("main").classList.toggle("only-before", data.steps.length === 1);
  document.body.classList.toggle("only-before", data.steps.length === 1);
  const all = new View(data.steps.length - 1, () => false);
  if (all.boxes.size <= data.expandedUpTo) openCalls();
  byId("step").max = data.steps.length - 1;
  byId("step").addEventListener("input", () => goTo(Number(byId("step").value)));
  byId("step-back").addEventListener("click", () => goTo(state.step - 1));
  byId("step-on").addEventListener("click", () => goTo(state.step + 1));
  byId("search").addEventListener("input", search);
  byId("expand-all").addEventListener("click", () => openAll(true));
  byId("collapse-all").addEventListener("click", () => openAll(false));
  byId("zoom-in").addEventListener("click", () => zoomBy(1.25));
  byId("zoom-out").addEventListener("click", () => zoomBy(0.8));
  byId("zoom-fit").addEventListener("click", () => fit(0));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || origin === null || !views[origin.side].elements.has(origin.key)) return;
    if (byId("details").contains(document.activeElement)) focusBox(views[origin.side], origin.key);
  });
  document.body.classList.toggle("no-cost", data.costs.nodes.length === 0);
  byId("batch").value = data.costs.B;
  byId("length").value = data.costs.L;
  byId("length-example").textContent = `${data.costs.L}, ${data.costs.features.at(-1)}=50`;
  byId("ranks").textContent = data.costs.W > 1 ? `W = ${data.costs.W} ranks` : "";
  for (const name of ["batch", "length"]) byId(name).addEventListener("input", priceAgain);
  redraw();
  priceAgain();
  fit(READABLE);
  document.documentElement.dataset.ready = "true";
}

function openCalls() {
  state.open = new Set(calls.map((call) => call.name));
}

start();
