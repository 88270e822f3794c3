// --- details

let origin = null;

function select(side, key, table = null) {
  [state.selected, state.ofRank, state.table] = [key, [], table];
  drawHeat();
  origin = { side, key };
  markFound();
  const box = views[side].boxes.get(key);
  const [node] = box.nodes;
  if (!node) show(box.lines[0], []);
  else if (box.nodes.length > 1) showStack(box);
  else if (node.kind === "call") showCollection(node);
  else showNode(node, box.call);
  byId("details").scrollTop = 0;
}

/** Show something that is called `title`; `call` calls the collection around it. */
function show(title, parts, call = null) {
  byId("details-title").textContent = title;
  const up = call ? [" › ", button(labelOf(collectionOf(call)), () => showCollection(call), { class: "link" })] : [];
  byId("trail").replaceChildren(data.title, ...up);
  byId("details-body").replaceChildren(...parts);
}

function facts(pairs, attributes = {}) {
  const list = element("dl", attributes);
  for (const [name, value] of pairs) {
    if (value === "" || value === undefined || value === null || value.length === 0) continue;
    list.append(element("dt", {}, name), element("dd", {}, Array.isArray(value) ? listOf(value) : value));
  }
  return list;
}

const listOf = (items) => element("ul", {}, ...items.map((each) => element("li", {}, each)));

const code = (text) => (text ? element("code", {}, text) : "");

/** What nodes of one kind have in common. */
const factsOfKind = (node, collection) => [
  ["kind", node.kind],
  ["stage", STAGES[node.stage]],
  ["source", code(node.source || collection?.sources[0])],
  ["collection", collection ? code(labelOf(collection)) : ""],
];

function showNode(node, call) {
  reshow = () => showNode(node, call);
  const collection = call ? collectionOf(call) : null;
  const tables = collection ? (node.tables ?? []).map((place) => collection.tables[place]).filter(Boolean) : [];
  show(node.name, [
    ...askedFor(tables),
    ...costTable(totals(costsOf([node])), new Map(costsOf([node]).flatMap((cost) => cost.amounts))),
    facts([
      ...factsOfKind(node, collection),
      ["touched by", (node.passes ?? []).join(" → ")],
      ["shape", code(node.shape)],
      ["bytes", code(node.bytes)],
      ["type", node.dtype],
      ["device", node.device],
      ["kernel", node.kernel],
      ["why", node.why],
      ["sends", node.collectives],
      ["text", code(node.line)],
      ["inputs", (node.inputs ?? []).slice(0, 12).map(code)],
    ]),
    ...(call ? [button("Collapse its collection", () => toggleCall(call, false))] : []),
    ...tableList(tables),
  ], call);
}

function showStack({ nodes, call }) {
  reshow = () => showStack({ nodes, call });
  const [first] = nodes;
  const shown = nodes.slice(0, MOST_TABLES).map((node) => button(node.name, () => showNode(node, call)));
  if (nodes.length > MOST_TABLES) shown.push(`and ${counted(nodes.length - MOST_TABLES, "more", "more")}`);
  show(`${counted(nodes.length, "node")}: ${call ? first.kind : shortLine(first)}`, [
    ...costTable(totals(costsOf(nodes))),
    facts([...factsOfKind(first, call ? collectionOf(call) : null), ["kernel", first.kernel]]),
    ...(call ? [button("Collapse their collection", () => toggleCall(call, false))] : []),
    listOf(shown),
  ], call);
}

function showCollection(call) {
  reshow = () => showCollection(call);
  const collection = collectionOf(call);
  const opened = state.open.has(call.name);
  show(labelOf(collection), [
    ...askedFor(collection.tables),
    ...costTable(totals(data.costs.nodes.filter((node) => node.collection === call.collection))),
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
      ["declined", [...new Set(stepOf(collection, state.step)?.declined ?? [])].slice(0, 20)],
    ]),
    ...(collection.steps.length ? [button(opened ? "Collapse" : "Expand", () => toggleCall(call, !opened))] : []),
    ...tableList(collection.tables),
  ]);
}

const TABLE_FACTS = ["table", "features", "rows", "dim", "pooling", "type", "hashing"];

const inWords = ([name, features, rows, dim, ...more]) => [name, features.join(", "), rows.toLocaleString("en"), String(dim), ...more];

/** What is known of the table that was asked for, if it is one of these. */
function askedFor(tables) {
  if (state.table === null || !tables.includes(state.table)) return [];
  const values = inWords(state.table);
  const pairs = TABLE_FACTS.map((name, place) => [name, values[place]]);
  return [facts([...pairs, ["on", placesOf(state.table)]], { class: "found" })];
}

function tableList(tables, limit = MOST_TABLES) {
  if (tables.length === 0) return [];
  const text = searched();
  const isNamed = ([name, features]) => text && [name, ...features].some((each) => each.toLowerCase().includes(text));
  const isHit = (one) => one === state.table || isNamed(one);
  const shown = [...tables.filter(isHit), ...tables.filter((one) => !isHit(one))].slice(0, limit);
  const list = table("Tables", TABLE_FACTS, shown.map(inWords), { isFound: (place) => isHit(shown[place]) });
  if (tables.length <= limit) return [list];
  const more = button(`Show all ${tables.length.toLocaleString("en")} tables`, () => {
    list.remove();
    more.replaceWith(...tableList(tables, Infinity));
  });
  return [list, more];
}
