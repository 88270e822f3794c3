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
  if (name === TIME) {
    if (like >= 1) return `${value.toFixed(2)} s`;
    return like >= 1e-3 ? `${(1e3 * value).toFixed(2)} ms` : `${(1e6 * value).toFixed(1)} µs`;
  }
  const bytes = name.startsWith("bytes");
  const [step, units] = bytes ? [1024, ["KiB", "MiB", "GiB", "TiB"]] : [1000, ["K", "M", "G", "T"]];
  let unit = bytes ? "B" : "";
  for (const larger of units) {
    if (like < step) break;
    [value, like] = [value / step, like / step];
    unit = larger;
  }
  if (bytes) return `${value.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
  return unit ? `${value.toFixed(2)} ${unit}` : String(Math.round(value * 100) / 100);
}

const exactly = (value) => (value === null ? "" : value.toLocaleString("en", { maximumFractionDigits: 6 }));

/** A table of amounts; `texts` has the expressions, for a single node. */
function costTable(amounts, texts = new Map()) {
  if (amounts.size === 0) return [];
  const columns = ["per step", "number", ...(texts.size ? ["expression"] : [])];
  const rows = [...amounts].map(([name, value]) =>
    element("tr", {},
      element("th", { scope: "row" }, name),
      element("td", { class: "number", title: exactly(value) }, inUnits(value, name)),
      texts.size ? element("td", {}, code(texts.get(name))) : null));
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  return [element("table", { class: "cost" }, element("thead", {}, head), element("tbody", {}, ...rows))];
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
  const { hardware, note, W } = data.costs;
  const what = (name) => (name === TIME ? ` predicted for ${hardware}` : name.replace(/^bytes/, ""));
  const found = [...totals(data.costs.nodes)].map(([name, value]) => inUnits(value, name) + what(name));
  const step = data.costs.trains ? "training step" : "step in eval mode";
  const { value } = byId("length");
  const numbers = `B=${batch}${W > 1 ? " per rank" : ""}, L: ${value.length > 60 ? `${value.slice(0, 60)}…` : value}`;
  const onRank = W > 1 ? `, on this rank${hardware ? ", without waiting for others" : ""}` : "";
  byId("cost-total").textContent =
    `One ${step} of the whole model, ${numbers}${onRank}: ${found.join(", ")}. ${note}`.trim();
  paint();
  reshow();
}

