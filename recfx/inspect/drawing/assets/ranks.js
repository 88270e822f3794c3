// --- tables by rank: a heat map of what every table costs every rank, and the tables of one rank

const SUMS = 40; // pixels above the map, for the numbers of ranks, and for their sums
const BARS = 14; // where the sums begin
const READABLE = 10;
let map = null; // what was drawn: rows, and where they are

const times = ({ ranks }, rank) => ranks.filter(([first, end]) => first <= rank && rank < end).length;

const shardsOn = (rank) => data.costs.shards.filter((shards) => times(shards, rank));

function startRanks() {
  const { shards, W, rank } = data.costs;
  document.body.classList.toggle("sharded", shards.length > 0);
  if (!shards.length) return;
  state.rank = rank;
  byId("rank").max = W - 1;
  on("rank", "input", () => {
    const number = Number(byId("rank").value);
    if (byId("rank").value && Number.isInteger(number) && number >= 0 && number < W) chooseRank({ rank: number });
  });
  on("heat", "click", (event) => chooseRank(placeOf(event)));
  on("heat", "mousemove", (event) => tellCell(placeOf(event)));
  on("heat", "keydown", onHeatKey);
  new ResizeObserver(drawHeat).observe(byId("heat"));
}

/** What the map shows: what bars show, if it depends on the tables of a rank. */
const heatMeasure = () => [shownMeasure(), "moved", "kept"].find((each) => sumOf(each, data.costs.shards) > 0) ?? "kept";

const tableOf = (shards) => data.collections[shards.collection]?.tables.find(([name]) => name === shards.table);

/** The ranks that have a table, by sharding type. */
function placesOf(table) {
  const name = ([first, end]) => (end - first === 1 ? String(first) : `${first} to ${end - 1}`);
  const found = data.costs.shards.filter((shards) => tableOf(shards) === table);
  const isHere = found.some((shards) => times(shards, data.costs.rank));
  const places = found.map(({ type, ranks }) => `${type}: rank ${ranks.map(name).join(", ")}`);
  return found.length && !isHere ? [...places, `not in this graph, which is that of rank ${data.costs.rank}`] : places;
}

/** The tables, costliest first, with [value, ranges of ranks] of their cells; and the sum of each rank. */
function heatRows(measure) {
  const [rows, sums] = [new Map(), new Array(data.costs.W).fill(0)];
  for (const shards of data.costs.shards) {
    const key = `${shards.collection}\n${shards.table}`;
    if (!rows.has(key)) rows.set(key, { label: shards.table, table: tableOf(shards), cells: [], sum: 0 });
    const [row, value] = [rows.get(key), sumOf(measure, [shards])];
    row.cells.push([value, shards.ranks]);
    for (const [first, end] of shards.ranks) {
      row.sum += value * (end - first);
      for (let rank = first; rank < end; rank++) sums[rank] += value;
    }
  }
  return [[...rows.values()].sort((left, right) => right.sum - left.sum), sums];
}

function drawHeat() {
  const canvas = byId("heat");
  if (!data.costs.shards.length || !canvas.clientWidth) return;
  const measure = heatMeasure();
  const [rows, sums] = heatRows(measure);
  const scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [canvas.clientWidth * scale, canvas.clientHeight * scale];
  const paper = canvas.getContext("2d");
  paper.scale(scale, scale);
  Object.assign(paper, { font: "10px Helvetica, Arial, sans-serif", textBaseline: "middle", lineWidth: 2 });
  const widthOf = (text) => paper.measureText(text).width;
  const row = Math.min((canvas.clientHeight - SUMS - 4) / rows.length, 22);
  const named = rows.filter((_, place) => place % Math.ceil(READABLE / row) === 0);
  const room = Math.min(Math.max(...["whole rank", ...named.map(({ label }) => label)].map(widthOf)), 0.35 * canvas.clientWidth);
  const left = room + 10;
  const column = (canvas.clientWidth - left - 4) / sums.length;
  map = { measure, rows, sums, row, left, column };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
  const [ink, heat, bar] = ["ink", "heat", "mark"].map(colour);
  const [gapX, gapY] = [column > 6 ? 1 : 0, row > 6 ? 1 : 0];
  const [most, fullest] = [Math.max(...rows.flatMap(({ cells }) => cells.map(([value]) => value))), Math.max(...sums)];
  const fill = (style, x, y, width, height) => {
    paper.fillStyle = style;
    paper.fillRect(x, y, Math.max(width, 0.5), Math.max(height, 0.5));
  };
  const write = (text, x, y, width) => {
    paper.fillStyle = ink;
    paper.fillText(text, x, y, width);
  };
  /** A text in the middle of the column of a rank, if there is room for it. */
  const inColumn = (text, rank, y, columns = 1) => {
    if (widthOf(text) + 3 < columns * column) write(text, left + (rank + 0.5) * column - widthOf(text) / 2, y);
  };
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((count) => widthOf("0000") < count * column) ?? sums.length;
  write("rank", 4, BARS / 2);
  write("whole rank", 4, (BARS + SUMS) / 2);
  sums.forEach((sum, rank) => {
    const height = ((SUMS - BARS - 3) * sum) / fullest;
    fill(bar, left + rank * column, SUMS - 3 - height, column - gapX, height);
    if (rank % every === 0) inColumn(String(rank), rank, BARS / 2, every);
  });
  const numberOf = (value) => measured(measure, value, most).split(" ")[0]; // in the unit of the scale
  const hasNumbers = row > READABLE && widthOf(numberOf(most)) + 3 < column;
  rows.forEach(({ label: name, cells }, place) => {
    const y = SUMS + place * row;
    if (named.includes(rows[place])) write(name, 4, y + row / 2, room);
    for (const [value, ranges] of cells) {
      for (const [first, end] of ranges) {
        const step = gapX ? 1 : end - first; // without gaps, ranks that are alike are one rectangle
        paper.globalAlpha = 0.12 + (0.88 * value) / (most || 1);
        for (let rank = first; rank < end; rank += step) fill(heat, left + rank * column, y, step * column - gapX, row - gapY);
        paper.globalAlpha = 1;
        for (let rank = first; hasNumbers && rank < end; rank++) inColumn(numberOf(value), rank, y + row / 2);
      }
    }
  });
  paper.strokeStyle = colour("link");
  paper.strokeRect(left + state.rank * column - 1, 1, Math.max(column - gapX, 1) + 2, SUMS + rows.length * row);
  const asked = rows.findIndex(({ table }) => table === state.table);
  if (asked >= 0) paper.strokeRect(1, SUMS + asked * row - 1, canvas.clientWidth - 2, Math.max(row - gapY, 1) + 2);
  byId("rank").value = state.rank;
  const over = fullest ? (fullest * sums.length) / sums.reduce((sum, each) => sum + each, 0) : 1;
  byId("heat-scale").textContent = `a table: 0 to ${measured(measure, most)}`;
  byId("heat-sums").textContent = `bar: a whole rank, up to ${measured(measure, fullest)}`;
  byId("ranks-summary").textContent =
    `${MEASURES[measure].name}: rank ${sums.indexOf(fullest)} has most, ${measured(measure, fullest)}, ${over.toFixed(2)} times the mean`;
}

/** The rank and the table under the pointer. */
function placeOf({ offsetX, offsetY }) {
  const rank = Math.floor((offsetX - map.left) / map.column);
  return { rank: Math.min(Math.max(rank, 0), map.sums.length - 1), row: map.rows[Math.floor((offsetY - SUMS) / map.row)] };
}

function cellText({ rank, row }) {
  if (!row) return `rank ${rank}: ${measured(map.measure, map.sums[rank])}`;
  const here = row.cells.filter(([, ranks]) => times({ ranks }, rank));
  if (!here.length) return `${row.label} is not on rank ${rank}`;
  const sum = here.reduce((total, [value, ranks]) => total + value * times({ ranks }, rank), 0);
  return `${row.label} on rank ${rank}: ${measured(map.measure, sum)}`;
}

const tellCell = (place) => (byId("heat-cell").textContent = cellText(place));

function onHeatKey(event) {
  const go = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!go) return;
  event.preventDefault();
  const rank = Math.min(Math.max(state.rank + go[0], 0), map.sums.length - 1);
  const row = map.rows.findIndex(({ table }) => table === state.table) + go[1]; // -1 is above all tables
  chooseRank({ rank, row: map.rows[Math.min(row, map.rows.length - 1)] });
}

/** Show a rank, and the table of a row of the map. */
function chooseRank({ rank, row }) {
  [state.rank, state.table] = [rank, row?.table ?? null];
  drawHeat();
  tellCell({ rank, row });
  showRank(rank);
}

/** Where the graph has the table of a shard, as the search finds it. */
function inGraph(shards) {
  const call = calls.find(({ collection }) => collection === shards.collection);
  return call && { call, table: collectionOf(call).tables.findIndex(([name]) => name === shards.table) };
}

/** What a rank has, costliest first; the lookups of these tables are marked in the graph. */
function showRank(rank) {
  reshow = () => showRank(rank);
  state.selected = null;
  state.ofRank = shardsOn(rank).map(inGraph).filter(Boolean);
  markFound();
  const own = shardsOn(rank).flatMap((shards) => new Array(times(shards, rank)).fill(shards));
  own.sort((left, right) => sumOf(heatMeasure(), [right]) - sumOf(heatMeasure(), [left]));
  const known = Object.keys(MEASURES).filter((each) => sumOf(each, data.costs.shards) > 0);
  const columns = ["table", ...known.map((each) => MEASURES[each].name), "sharding", "rows x dim"];
  const rows = own.map((shards) => {
    const found = inGraph(shards);
    const opens = found ? button(shards.table, () => reveal(found), { class: "link" }) : shards.table;
    const numbers = known.map((each) => numberCell(measured(each, sumOf(each, [shards]))));
    return [opens, ...numbers, shards.type, `${shards.rows.toLocaleString("en")} x ${shards.columns}`];
  });
  show(`Rank ${rank}: ${counted(own.length, "shard")}`, [
    ...askedFor([state.table]),
    element("p", { class: "quiet" }, `Tables alone. The graph is that of rank ${data.costs.rank}; what it looks up of them is marked.`),
    ...costTable(totals(own)),
    table("Shards", columns, rows, { isFound: (place) => tableOf(own[place]) === state.table }),
  ]);
}
