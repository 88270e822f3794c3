"use strict";

// The page of recfx.draw. `data` has the facts, Graphviz (the global Viz) places boxes and arrows, and this script joins
// the two. All names are the user's, so they are only ever set as text, never as markup.

const STAGES = {
  select: "select: which ids",
  hash: "hash: ids to rows",
  dist: "dist: between ranks",
  lookup: "lookup: rows of tables",
  dense: "dense: everything else",
  io: "input and output",
  kept: "kept: not converted",
};
const MOST_RESULTS = 40;
const MOST_TABLES = 100;
const STACK_FROM = 6; // so many like nodes of a collection are drawn as one stack
const EXPANDED_UP_TO = 60; // if there are more boxes, collections are drawn as one box each
const LONGEST = 60; // longer lines of a box, and longer labels, are cut in the middle
const TIME = "predicted time"; // the name of the amount that is in seconds
const BEFORE = 0;
const STAGE_COLOURS = "stage";
const MARGIN = 20; // around a graph, in pixels
const LARGEST = { before: 1, after: 1.6 }; // how far graphs are enlarged to fill their places

const byId = (id) => document.getElementById(id);
let data = null; // the facts
let viz = null; // Graphviz
const state = {
  step: 0,
  open: new Set(), // calls whose collection is not collapsed
  rank: 0, // whose tables are shown
  selected: null, // the key of a box
  table: null, // the one that was asked for, as its collection has it
  ofRank: [], // the tables of the rank that details show, as the search finds them
  found: new Set(), // keys of boxes that the search has found, or that have these tables
  zoom: { before: 1, after: 1 },
  colour: STAGE_COLOURS, // or one of MEASURES
  isFitted: true, // whether graphs change their sizes with their places
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

/** An element of a drawing. */
function svgElement(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

const button = (text, action, attributes = {}) =>
  element("button", { type: "button", onclick: action, ...attributes }, text);

/** A table that scrolls by itself; a cell is a text, an element inside a cell, or a cell. */
function table(name, columns, rows, { isFound = () => false, ...attributes } = {}) {
  const cell = (each) => (each instanceof HTMLTableCellElement ? each : element("td", {}, each ?? ""));
  const head = element("tr", {}, ...columns.map((column) => element("th", { scope: "col" }, column)));
  const lines = rows.map((cells, place) => element("tr", { class: isFound(place) && "found" }, ...cells.map(cell)));
  return element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": name },
    element("table", attributes, element("thead", {}, head), element("tbody", {}, ...lines)));
}

const numberCell = (text, title = "") => element("td", { class: "number", title }, text);

const on = (id, event, act) => byId(id).addEventListener(event, act);

const counted = (number, word, words = `${word}s`) => `${number.toLocaleString("en")} ${number === 1 ? word : words}`;

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

const collectionOf = (call) => data.collections[call.collection];
const labelOf = (collection) => collection.paths[0] || "(root)";

/** The graph of a collection after a step: after its own last pass up to then; null before the first. */
function stepOf(collection, step) {
  const done = new Set(data.steps.slice(0, step + 1));
  return collection.steps.filter((each) => done.has(each.name)).at(-1) ?? null;
}

const innerNodes = (found) => (found === null ? [] : found.nodes.map((place) => data.nodes[place]));

/** The nodes that are drawn as boxes: items of what others return are arrows. */
const boxNodes = (found) => innerNodes(found).filter((node) => node.kind !== "item");

const isLone = (call) => !call.inputs && !outer.some((node) => (node.inputs ?? []).includes(call.name));

function shortLine(node) {
  if (node.kind === "input") return node.name;
  if (node.kind === "output") return "output";
  const called = (node.line ?? "").split(" = ").slice(1).join(" = ").split("(")[0];
  return called.replace(/^call_\w+\[(.*)\]$/, "$1") || node.name;
}

/** Nodes of the model that do alike things with the same inputs, such as to take out one feature each, by stack. */
function outerStacks() {
  const groups = new Map();
  for (const node of outer.filter(({ kind }) => kind === "dense")) {
    const key = [shortLine(node).replace(/'[^']*'|\d+/g, ""), ...(node.inputs ?? [])].join(" ");
    groups.set(key, [...(groups.get(key) ?? []), node]);
  }
  const stacked = [...groups].filter(([key, nodes]) => nodes.length >= STACK_FROM);
  return new Map(stacked.flatMap(([key, nodes]) => nodes.map((node) => [node, key])));
}

