// --- links: a fragment such as #node=ebc_lookup names what the page shows

/** A link to what is shown; names may be anything. */
const linkTo = (kind, name) => `#${new URLSearchParams({ [kind]: name })}`;

/** What a fragment asks for, as the search would find it; undefined if nothing is called so. */
function linked(kind, name) {
  const isIt = (node) => node.name === name && node.kind !== "item" && node.kind !== "call";
  for (const call of calls) {
    const collection = collectionOf(call);
    if (kind === "collection" && collection.paths.some((path) => path === name)) return { call };
    const table = collection.tables.findIndex((each) => each[0] === name);
    if (kind === "table" && table >= 0) return { call, table };
    const node = kind === "node" ? innerNodes(stepOf(collection, state.step)).find(isIt) : undefined;
    if (node) return { call, node };
  }
  const node = kind === "node" ? outer.find(isIt) : undefined;
  return node && { node };
}

/** Show what the fragment names; says whether there is such a thing. */
function follow() {
  byId("status").textContent = "";
  const [[kind, name] = []] = new URLSearchParams(location.hash.slice(1));
  if (kind === "rank" && byId("rank").max && /^\d+$/.test(name) && Number(name) < data.costs.W) {
    chooseRank({ rank: Number(name) });
    return true;
  }
  if (kind === undefined || !["node", "collection", "table", "rank"].includes(kind)) return false;
  if (kind !== "rank" && linked(kind, name) === undefined) goTo(data.steps.length - 1); // it may come with a later pass
  const found = kind === "rank" ? undefined : linked(kind, name);
  if (found) reveal(found);
  else byId("status").textContent = `There is no ${kind} “${name}” in this picture.`;
  return found !== undefined;
}
