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

