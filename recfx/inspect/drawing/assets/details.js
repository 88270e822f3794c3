// --- details

let origin = null;

function select(side, key, table = null) {
  [state.selected, state.ofRank, state.table] = [key, [], table];
  drawHeat();
  origin = { side, key };
  markFound();
  const box = views[side].boxes.get(key);
  const body = byId("details-body");
  if (box.nodes.length === 0) show(box.lines[0], []);
  else if (box.nodes.length > 1) showStack(box);
  else if (box.nodes[0].kind === "call") showCollection(box.nodes[0], box);
  else showNode(box.nodes[0], box.call);
  byId("details").scrollTop = 0;
  return body;
}

/** Show something that is called `title`; `link` leads to it, and `call` calls the collection around it. */
function show(title, parts, link = "", call = null) {
  byId("details-title").textContent = title;
  const up = call ? [" › ", button(labelOf(collectionOf(call)), () => showCollection(call), { class: "link" })] : [];
  byId("trail").replaceChildren(data.title, ...up, ...links(link).flatMap((each) => [" › ", each]));
  byId("details-body").replaceChildren(...parts);
}

/** In a notebook's frame, links to places of this page would lead to the notebook. */
const isFramed = location.protocol === "about:";
if (isFramed) document.querySelector(".skip").remove();

function links(link) {
  const there = data.report && /^#(node|collection|table)=/.test(link);
  return [
    ...(link && !isFramed ? [element("a", { href: link }, "link to this")] : []),
    ...(there ? [element("a", { href: data.report + link }, "in the report")] : []),
  ];
}

function facts(pairs, attributes = {}) {
  const list = element("dl", attributes);
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
    ...askedFor(tables),
    ...costTable(totals(costsOf([node])), new Map(costsOf([node]).flatMap((cost) => cost.amounts))),
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
    facts([
      ["text", code(node.line)],
      ["inputs", (node.inputs ?? []).slice(0, 12).map(code)],
    ]),
    ...(call ? [button("Collapse its collection", () => toggleCall(call, false))] : []),
    ...tableList(tables),
  ], linkTo("node", node.name), call);
}

function showStack(box) {
  reshow = () => showStack(box);
  const [first] = box.nodes;
  const group = box.key;
  const collection = box.call ? collectionOf(box.call) : null;
  show(`${counted(box.nodes.length, "node")}: ${collection ? first.kind : shortLine(first)}`, [
    ...costTable(totals(costsOf(box.nodes))),
    facts([
      ["kind", first.kind],
      ["stage", STAGES[first.stage]],
      ["source", code(first.source || collection?.sources[0])],
      ["collection", collection ? code(labelOf(collection)) : ""],
      ["kernel", first.kernel],
    ]),
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
  ], "", box.call);
}

function showCollection(call, box) {
  reshow = () => showCollection(call, box);
  const collection = collectionOf(call);
  const opened = state.open.has(call.name);
  const found = stepOf(collection, state.step);
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
      ["declined", found === null ? "" : [...new Set(found.declined)].slice(0, 20)],
    ]),
    ...(collection.steps.length ? [button(opened ? "Collapse" : "Expand", () => toggleCall(call, !opened))] : []),
    ...tableList(collection.tables),
  ], linkTo("collection", collection.paths[0]));
}

const TABLE_FACTS = ["table", "features", "rows", "dim", "pooling", "type", "hashing"];

const inWords = ([name, features, rows, dim, ...more]) => [name, features.join(", "), rows.toLocaleString("en"), String(dim), ...more];

/** What is known of the table that was asked for, if it is one of these. */
function askedFor(tables) {
  if (state.table === null || !tables.includes(state.table)) return [];
  const values = inWords(state.table);
  const pairs = TABLE_FACTS.map((name, place) => [name, values[place]]);
  return [facts([...pairs, ["on", placesOf(state.table)], ["see", links(linkTo("table", values[0]))]], { class: "found" })];
}

function tableList(tables, limit = MOST_TABLES) {
  if (tables.length === 0) return [];
  const wanted = byId("search").value.trim().toLowerCase();
  const isFound = ([name, features]) => wanted && [name, ...features].some((each) => each.toLowerCase().includes(wanted));
  const hit = (table) => table === state.table || isFound(table);
  const shown = [...tables.filter(hit), ...tables.filter((table) => !hit(table))].slice(0, limit);
  const rows = shown.map((table) =>
    element("tr", { class: hit(table) ? "found" : false }, ...inWords(table).map((cell) => element("td", {}, cell))));
  const head = element("tr", {}, ...TABLE_FACTS.map((name) => element("th", { scope: "col" }, name)));
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

