// --- keyboard

function onKey(event, view, box) {
  const go = { ArrowDown: "next", ArrowUp: "previous", ArrowLeft: "left", ArrowRight: "right" }[event.key];
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    select(view.side, box.key);
    byId("details").focus();
  } else if (go) {
    event.preventDefault();
    const target = neighbour(view, box.key, go);
    if (target !== undefined) focusBox(view, target);
  }
}

/** Keys that do something wherever the focus is, unless something is typed. */
function onAnyKey(event) {
  if (event.key === "Escape" && origin !== null && views[origin.side].elements.has(origin.key)) {
    if (byId("details").contains(document.activeElement)) focusBox(views[origin.side], origin.key);
  }
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select")) return;
  const act = {
    "+": () => zoomBy(1.25),
    "-": () => zoomBy(0.8),
    0: fit,
    "[": () => goTo(state.step - 1),
    "]": () => goTo(state.step + 1),
    "/": () => byId("search").focus(),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

/** Down and up: the nearest box along an arrow, or else any in that direction. Left and right: the nearest one. */
function neighbour(view, key, direction) {
  const centre = (other) => {
    const { x, y, width, height } = view.elements.get(other).getBBox();
    return [x + width / 2, y + height / 2];
  };
  const [x, y] = centre(key);
  const vertical = direction === "next" || direction === "previous";
  const sign = direction === "next" || direction === "right" ? 1 : -1;
  let best;
  let least = Infinity;
  for (const other of view.elements.keys()) {
    const [otherX, otherY] = centre(other);
    const ahead = sign * (vertical ? otherY - y : otherX - x);
    const aside = Math.abs(vertical ? otherX - x : otherY - y);
    if (other === key || ahead < 1) continue;
    const linked = view.arrows.has(`${key}\n${other}`) || view.arrows.has(`${other}\n${key}`);
    const distance = vertical ? 8 * ahead + aside - (linked ? 1e6 : 0) : ahead + 4 * aside;
    if (distance < least) [best, least] = [other, distance];
  }
  return best;
}

function focusBox(view, key) {
  for (const shape of view.elements.values()) shape.setAttribute("tabindex", "-1");
  const shape = view.elements.get(key);
  shape.setAttribute("tabindex", "0");
  shape.focus();
  shape.scrollIntoView({ block: "nearest", inline: "nearest" });
}

