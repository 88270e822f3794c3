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

/** A number in a unit that fits it, or `like`, as recfx.cost prints it. */
function inUnits(value, name, like = value) {
  if (value === null) return "?";
  const bytes = name.startsWith("bytes");
  const scales = {
    [TIME]: [[1, " s", 2], [1e-3, " ms", 2], [0, " µs", 1]],
    bytes: [[2 ** 40, " TiB", 1], [2 ** 30, " GiB", 1], [2 ** 20, " MiB", 1], [2 ** 10, " KiB", 1], [0, " B", 0]],
    count: [[1e12, " T", 2], [1e9, " G", 2], [1e6, " M", 2], [1e3, " K", 2]],
  };
  const found = scales[name === TIME ? TIME : bytes ? "bytes" : "count"].find(([least]) => like >= least);
  if (!found) return String(Math.round(value * 100) / 100);
  const [least, unit, places] = found;
  return `${(value / (least || (bytes ? 1 : 1e-6))).toFixed(places)}${unit}`;
}

const exactly = (value) => (value === null ? "" : value.toLocaleString("en", { maximumFractionDigits: 6 }));

/** A table of amounts; `texts` has the expressions, for a single node. */
function costTable(amounts, texts = new Map()) {
  if (amounts.size === 0) return [];
  const rows = [...amounts].map(([name, value]) => [
    element("th", { scope: "row" }, name),
    numberCell(inUnits(value, name), exactly(value)),
    ...(texts.size ? [code(texts.get(name))] : []),
  ]);
  return [table("Cost", ["per step", "number", ...(texts.size ? ["expression"] : [])], rows, { class: "cost" })];
}

const costsOf = (nodes) => nodes.filter((node) => node.cost !== undefined).map((node) => data.costs.nodes[node.cost]);

/** "2", or "1, watched=50": the mean length of each feature; or what is wrong. */
function readLengths(text) {
  const { features, L } = data.costs;
  const named = new Map([["", L]]); // "" stands for all others
  for (const part of text.split(",").map((each) => each.trim()).filter(Boolean)) {
    const [, feature, number] = /^(?:([^]*)=)?([^=]*)$/.exec(part).map((each) => (each ?? "").trim());
    const value = Number(number);
    if (!number || !Number.isFinite(value) || value < 0) return [null, `“${part}” has no number that is at least 0`];
    if (feature && !features.includes(feature)) return [null, `there is no feature “${feature}”`];
    named.set(feature, value);
  }
  return [features.map((feature) => named.get(feature) ?? named.get("")), ""];
}

function priceAgain() {
  const batch = Number(byId("batch").value);
  const wrongBatch = Number.isInteger(batch) && batch >= 1 ? "" : "B is a whole number above 0";
  const [lengths, wrongLength] = readLengths(byId("length").value);
  byId("batch").setAttribute("aria-invalid", String(Boolean(wrongBatch)));
  byId("length").setAttribute("aria-invalid", String(Boolean(wrongLength)));
  if (wrongBatch || wrongLength) {
    byId("cost-total").textContent = `${[wrongBatch, wrongLength].filter(Boolean).join("; ")}.`;
    return;
  }
  [given.batch, given.lengths] = [batch, lengths];
  const { hardware, note, W, trains, nodes } = data.costs;
  const what = (name) => (name === TIME ? ` predicted for ${hardware}` : name.replace(/^bytes/, ""));
  const found = [...totals(nodes)].map(([name, value]) => inUnits(value, name) + what(name));
  const { value } = byId("length");
  const numbers = `B=${batch}${W > 1 ? " per rank" : ""}, L: ${value.length > 60 ? `${value.slice(0, 60)}…` : value}`;
  const onRank = W > 1 ? `, on this rank${hardware ? ", without waiting for others" : ""}` : "";
  const step = `One ${trains ? "training step" : "step in eval mode"} of the whole model, ${numbers}${onRank}`;
  byId("cost-total").textContent = `${step}: ${found.join(", ")}. ${note}`.trim();
  paint();
  reshow();
}
