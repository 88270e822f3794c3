// --- views: the boxes and arrows of a step

class View {
  constructor(step, collapse) {
    this.step = step;
    this.boxes = new Map(); // by key: { key, lines, stage, call, nodes, collapsed }
    this.arrows = new Map();
    this.clusters = new Map();
    this.lone = []; // the first and the last box of each open collection that no arrow reaches
    this.takers = new Map();
    this.givers = new Map();
    this.collapse = collapse;
    const stacks = outerStacks();
    for (const node of outer) {
      if (node.kind === "call") {
        this.addCall(node);
        continue;
      }
      const key = stacks.get(node) ?? node.name;
      this.givers.set(node.name, [key, ""]);
      this.takers.set(node.name, [key]);
      this.add({ key, lines: [shortLine(node)], stage: node.stage, nodes: [node] }, shortLine);
    }
    for (const node of outer) {
      for (const source of node.inputs ?? []) {
        const [tail, label] = this.givers.get(source) ?? [source, ""];
        for (const head of this.takers.get(node.name) ?? [node.name]) this.arrow(tail, head, label);
      }
    }
  }

  /** A box, or one more node in the box of a stack, whose nodes are called `name`. */
  add(box, name = ({ kind }) => kind) {
    const known = this.boxes.get(box.key);
    if (!known) return this.boxes.set(box.key, box);
    known.nodes.push(...box.nodes);
    const [first] = known.nodes;
    known.lines = [`▸ ${known.nodes.length.toLocaleString("en")} x ${name(first)}`, first.kernel ? `kernel ${first.kernel}` : ""];
  }

  arrow(tail, head, label) {
    if (!this.boxes.has(tail) || !this.boxes.has(head)) return;
    const key = `${tail}\n${head}`;
    if (!this.arrows.has(key)) this.arrows.set(key, { tail, head, label });
  }

  addCall(call) {
    const collection = collectionOf(call);
    const found = stepOf(collection, this.step);
    if (found !== null && found.nodes.length > 0 && !this.collapse(call)) {
      this.clusters.set(call.name, `▾ ${labelOf(collection)}`);
      this.addNodes(call, collection, found);
      return;
    }
    const isKept = found === null && this.step !== BEFORE;
    const lines = [labelOf(collection), counted(collection.tables.length, "table")];
    if (found === null) lines.unshift(collection.was);
    if (isKept) lines.push("kept as it is");
    if (found !== null) lines.push(`▸ ${counted(boxNodes(found).length, "node")}`);
    this.add({ key: call.name, lines, stage: isKept ? "kept" : "lookup", nodes: [call], call, collapsed: found !== null });
    this.givers.set(call.name, [call.name, collection.shape]);
  }

  addNodes(call, collection, found) {
    const nodes = boxNodes(found);
    const items = new Map(innerNodes(found).filter((node) => node.kind === "item").map((node) => [node.name, node]));
    const keys = this.stacks(call, nodes);
    for (const node of nodes) {
      const lines = [node.kind, counted((node.tables ?? []).length, "table"), node.kernel ? `kernel ${node.kernel}` : ""];
      this.add({ key: keys.get(node.name), lines, stage: node.stage, nodes: [node], call });
    }
    const lone = isLone(call);
    const [entry, exit] = [`${call.name}/ input`, `${call.name}/ output`];
    if (lone) this.add({ key: entry, lines: ["features"], stage: "io", nodes: [], call });
    const shapes = new Map(nodes.map((node) => [node.name, node.shape ?? ""]));
    const takers = new Set();
    for (const node of nodes) {
      for (const given of node.inputs ?? []) {
        const item = items.get(given);
        const source = item ? item.inputs[0] : given;
        if (source === found.input) {
          takers.add(keys.get(node.name));
          this.arrow(entry, keys.get(node.name), "");
        } else {
          this.arrow(keys.get(source), keys.get(node.name), item ? item.name.replace(collection.prefix, "") : shapes.get(source));
        }
      }
    }
    this.takers.set(call.name, [...takers]);
    const giver = keys.get(found.giver);
    if (giver === undefined) return;
    this.givers.set(call.name, [giver, shapes.get(found.giver)]);
    if (lone) {
      this.add({ key: exit, lines: [collection.gives], stage: "io", nodes: [], call });
      this.arrow(giver, exit, shapes.get(found.giver));
      this.lone.push([entry, exit]);
    }
  }

  /** The key of each node's box: many like nodes share one. */
  stacks(call, nodes) {
    const groups = new Map();
    for (const node of nodes) {
      const group = `${call.name}/${node.kind} ${node.kernel ?? ""}`;
      groups.set(group, [...(groups.get(group) ?? []), node.name]);
    }
    const isStack = ([group, names]) => names.length >= STACK_FROM;
    const keyed = (one) => one[1].map((name) => [name, isStack(one) ? one[0] : `${call.name}/${name}`]);
    return new Map([...groups].flatMap(keyed));
  }

  /** What Graphviz is given; `aspect` is the width of the place for it over its height. */
  input(aspect) {
    this.order = [...this.boxes.keys()]; // names of the user's would come back from Graphviz as something else
    const names = new Map(this.order.map((key, place) => [key, `box${place}`]));
    const inside = new Map([...this.clusters.keys()].map((call) => [call, []]));
    const free = [];
    const membersOf = (key) => inside.get(this.boxes.get(key).call?.name) ?? free;
    for (const [key, box] of this.boxes) {
      const text = box.lines.filter(Boolean).map(label).join("\n");
      membersOf(key).push({ name: names.get(key), attributes: { label: text, class: `stage-${box.stage}` } });
    }
    const lone = free.map(({ name }) => name); // before labels are added
    const edges = [...this.arrows.values()].flatMap(({ tail, head, label: text }, place) => {
      const [from, to] = [names.get(tail), names.get(head)];
      if (!text) return [{ tail: from, head: to, attributes: { minlen: 2 } }];
      // Graphviz keeps no place for a label of an edge inside a cluster, but it does for a node.
      const name = `label${place}`;
      const around = membersOf(tail) === membersOf(head) ? membersOf(tail) : free;
      around.push({ name, attributes: { ...LABEL, label: label(text) } });
      return [{ tail: from, head: name, attributes: { arrowhead: "none" } }, { tail: name, head: to }];
    });
    return {
      directed: true,
      graphAttributes: { bgcolor: "transparent", nodesep: 0.2, ranksep: 0.16, fontname: "Helvetica", pad: 0.05 },
      nodeAttributes: { shape: "box", style: "rounded,filled", fontname: "Helvetica", fontsize: 12, margin: "0.12,0.09" },
      edgeAttributes: { arrowsize: 0.7 },
      nodes: free,
      edges: [...edges, ...this.columns(lone, edges, names, aspect)],
      subgraphs: [...inside].map(([call, boxes], position) => ({
        name: `cluster_${position}`,
        graphAttributes: { label: label(this.clusters.get(call)), labeljust: "l", style: "rounded", fontname: "Helvetica", fontsize: 12 },
        nodes: boxes,
      })),
    };
  }

  /** What no arrow reaches would all stand side by side: invisible arrows put it into columns, to fill the place. */
  columns(free, edges, names, aspect) {
    const reached = new Set(edges.flatMap((edge) => [edge.tail, edge.head]));
    const boxes = free.filter((name) => !reached.has(name)).map((name) => [name, name]);
    const clusters = this.lone.map((pair) => pair.map((key) => names.get(key)));
    return [[boxes, 0.45], [clusters, 3]].flatMap(([alone, height]) => {
      const across = Math.max(1, Math.round(Math.sqrt(alone.length * aspect * height)));
      return alone.slice(across).map(([head], place) => ({ tail: alone[place][1], head, attributes: { style: "invis", minlen: 2 } }));
    });
  }
}

const LABEL = { shape: "plaintext", style: "", fontsize: 10, margin: "0.03,0.02", height: 0, width: 0, class: "label" };

/** A text as Graphviz takes it, to which backslashes and entities are escapes; names that are longer than a box should be are cut. */
function label(text) {
  const letters = [...text];
  const shown = letters.length <= LONGEST ? text : `${letters.slice(0, LONGEST - 10).join("")}…${letters.slice(-9).join("")}`;
  return shown.replace(/\\/g, "\\\\").replace(/&(?=#?\w+;)/g, "&amp;");
}

