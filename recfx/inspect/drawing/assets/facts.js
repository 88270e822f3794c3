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
  unstacked: new Set(), // stacks that are drawn one by one
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

