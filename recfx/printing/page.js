// Filter and sort the rows of the page, and show what a link names. Without this script the page is complete.
"use strict";
{
  const UNITS = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, k: 1e3, M: 1e6, G: 1e9, T: 1e12 };
  const MOST_OPENED = 20; // of the collections that have rows for a filter

  /** The number that a text begins with, in its unit; what has none comes last. */
  function amount(text) {
    const [, number, unit] = /^(-?[\d,]*\.?\d+)\s?([A-Za-z]+)?/.exec(text) ?? [];
    return number === undefined ? -Infinity : Number(number.replaceAll(",", "")) * (UNITS[unit] ?? 1);
  }

  /** Order the rows of a table by one column: downwards, upwards, and as they were. */
  function sort(table, head, rows) {
    const orders = head.classList.contains("number") ? ["descending", "ascending"] : ["ascending", "descending"];
    const order = [...orders, null][orders.indexOf(head.getAttribute("aria-sort")) + 1] ?? null;
    for (const each of head.parentElement.cells) each.removeAttribute("aria-sort");
    if (order) head.setAttribute("aria-sort", order);
    const text = (row) => row.cells[head.cellIndex].textContent;
    const compare = head.classList.contains("number")
      ? (one, other) => amount(text(one)) - amount(text(other)) || 0
      : (one, other) => text(one).localeCompare(text(other), undefined, { numeric: true });
    const sign = order === "descending" ? -1 : 1;
    table.tBodies[0].append(...(order ? [...rows].sort((one, other) => sign * compare(one, other)) : rows));
  }

  for (const table of document.querySelectorAll(".recfx table")) {
    const rows = [...table.tBodies[0].rows];
    for (const head of rows.length > 1 ? table.tHead.rows[0].cells : []) {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(table, head, rows));
      head.append(button);
    }
  }

  const rows = [...document.querySelectorAll(".recfx tbody tr")];
  const folded = [...document.querySelectorAll(".recfx > details")];
  const input = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter rows" });
  input.setAttribute("aria-label", "Filter rows: all of these words");
  const found = document.createElement("output");
  const bar = Object.assign(document.createElement("p"), { className: "filter" });
  bar.append(input, " ", found);

  /** Hide each row that, with the name of its collection, does not have all words of the filter. */
  function filter() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const texts = new Map(folded.map((each) => [each, each.querySelector("summary").textContent.toLowerCase()]));
    let shown = 0;
    for (const row of rows) {
      const text = `${row.textContent.toLowerCase()} ${texts.get(row.closest(".recfx > details")) ?? ""}`;
      row.hidden = !words.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    const hasRows = (part) => words.length === 0 || part.querySelector("tbody tr:not([hidden])") !== null;
    for (const part of document.querySelectorAll(".recfx .scroll, .recfx > details, .recfx > details > details")) {
      part.hidden = !hasRows(part);
      const before = part.previousElementSibling;
      if (part.className === "scroll" && /^H[23]$/.test(before?.tagName)) before.hidden = part.hidden;
    }
    const matching = folded.filter((each) => !each.hidden);
    if (words.length && matching.length <= MOST_OPENED) for (const each of matching) each.open = true;
    found.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
  }

  /** Open what is around the row that the address names, as in #node=ebc_lookup, and go there. */
  function follow() {
    const [named] = new URLSearchParams(location.hash.slice(1));
    const target = named && document.getElementById(named.join("="));
    if (!target) return;
    for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
    for (const each of document.querySelectorAll(".named")) each.classList.remove("named");
    target.classList.add("named");
    target.scrollIntoView({ block: "center" });
  }

  if (rows.length) document.querySelector(".recfx h1").after(bar);
  input.addEventListener("input", filter);
  addEventListener("hashchange", follow);
  follow();
}
