// --- the same as text

function listNodes() {
  const around = outer.filter((node) => node.kind !== "call");
  const parts = around.length ? [nodeTable("the model around the collections", around, null, calls.length === 0)] : [];
  for (const call of calls) {
    const [collection, found] = [collectionOf(call), stepOf(collectionOf(call), state.step)];
    const nodes = boxNodes(found);
    const has = found === null ? collection.status : counted(nodes.length, "node");
    const title = `${labelOf(collection)}: ${counted(collection.tables.length, "table")}, ${has}`;
    parts.push(nodeTable(title, nodes.length ? nodes : [call], call, calls.length <= 3));
  }
  byId("list").replaceChildren(...parts);
}

function nodeTable(title, nodes, call, open) {
  const made = element("details", { open }, element("summary", {}, title));
  const fill = () => {
    if (made.childElementCount > 1) return;
    const rows = nodes.map((node) => {
      const opens = button(node.name, () => {
        node.kind === "call" ? showCollection(node) : showNode(node, call);
        byId("details").focus();
      });
      const inputs = (node.inputs ?? []).slice(0, 6).join(", ");
      return [opens, node.stage, node.kind, inputs, node.shape, node.kernel, node.tables?.length, node.source];
    });
    made.append(table(title, ["node", "stage", "kind", "takes", "shape", "kernel", "tables", "source"], rows));
  };
  if (open) fill();
  made.addEventListener("toggle", () => made.open && fill());
  return made;
}
