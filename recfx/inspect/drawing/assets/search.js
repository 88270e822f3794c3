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
    for (const node of boxNodes(stepOf(collection, state.step))) {
      if (node.name.toLowerCase().includes(text)) found.push({ label: `node ${node.name}`, call, node });
    }
  }
  for (const node of outer) {
    if (node.kind !== "call" && node.name.toLowerCase().includes(text)) found.push({ label: `node ${node.name}`, node });
  }
  return found;
}

const searched = () => byId("search").value.trim().toLowerCase();

function search() {
  const found = searched() ? matches(searched()) : [];
  const more = found.length - MOST_RESULTS;
  const count = found.length ? counted(found.length, "match", "matches") : "Nothing found";
  byId("search-count").textContent = searched() ? count : "";
  byId("results").replaceChildren(
    ...found.slice(0, MOST_RESULTS).map((each) => element("li", {}, button(each.label, () => reveal(each)))),
    ...(more > 0 ? [element("li", { class: "quiet" }, `and ${more.toLocaleString("en")} more`)] : []),
  );
  markFound();
}

function markFound() {
  const found = searched() ? matches(searched()).slice(0, 1000) : state.ofRank;
  state.found = new Set(found.flatMap((each) => keysOf(lastView(), each)));
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
  }
  const view = lastView();
  const [key] = keysOf(view, match);
  const asked = table === undefined ? null : collectionOf(call).tables[table];
  if (key === undefined) {
    if (!call) return;
    [state.selected, state.table] = [null, asked]; // it is on other ranks
    markFound();
    drawHeat();
    showCollection(call);
    byId("details").scrollTop = 0;
    byId("details").scrollIntoView({ block: "nearest" });
    return;
  }
  select(view.side, key, asked);
  const box = view.boxes.get(key);
  if (box.nodes.length > 1) {
    const one = box.nodes.find((each) => (node ? each === node : (each.tables ?? []).includes(table)));
    if (one) showNode(one, box.call);
  }
  if (call && !node && table === undefined) showCollection(call);
  focusBox(view, key);
  byId("details").querySelector(".found")?.scrollIntoView({ block: "nearest" });
}

