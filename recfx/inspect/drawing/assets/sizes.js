// --- sizes: whole graphs fill their places, until the user zooms; then a small map shows which part is seen

const shownViews = () => Object.values(views).filter((view) => view !== null);

function resize(side) {
  const svg = byId(side).querySelector("svg");
  svg.setAttribute("width", views[side].width * state.zoom[side]);
  svg.setAttribute("height", views[side].height * state.zoom[side]);
  if (side === "after") showMap();
}

/** Zoom both graphs; what is in the middle stays there. */
function zoomBy(factor) {
  state.isFitted = false;
  for (const { side } of shownViews()) {
    const [canvas, before] = [byId(side), state.zoom[side]];
    const middle = [canvas.scrollLeft + canvas.clientWidth / 2, canvas.scrollTop + canvas.clientHeight / 2];
    state.zoom[side] = Math.min(Math.max(before * factor, 0.05), 4);
    resize(side);
    const by = state.zoom[side] / before;
    canvas.scrollTo(middle[0] * by - canvas.clientWidth / 2, middle[1] * by - canvas.clientHeight / 2);
  }
}

/** Show whole graphs. */
function fit() {
  state.isFitted = true;
  for (const { side, width, height } of shownViews()) {
    const { clientWidth, clientHeight } = byId(side);
    const room = Math.min((clientWidth - MARGIN) / width, (clientHeight - MARGIN) / height);
    state.zoom[side] = Math.max(Math.min(room, LARGEST[side]), 0.01);
    resize(side);
  }
}

/** The map: a mark for each box, and a frame around what is seen; hidden if all is seen. */
function showMap() {
  const canvas = byId("after");
  const isPart = canvas.scrollWidth > canvas.clientWidth || canvas.scrollHeight > canvas.clientHeight;
  byId("map").hidden = !isPart || state.isFitted;
  if (byId("map").hidden) return;
  const [view, svg] = [views.after, canvas.querySelector("svg")];
  const across = Math.min(160, (160 * view.width) / view.height);
  const scale = across / svg.clientWidth;
  byId("map").style.width = `${across}px`;
  byId("map").style.height = `${svg.clientHeight * scale}px`;
  if (view.marks === undefined) {
    const frame = svg.getBoundingClientRect();
    view.marks = [...view.elements.values()].map((shape) => {
      const { left, top, width, height } = shape.getBoundingClientRect();
      const of = (part, whole) => `${(100 * part) / whole}%`;
      const [x, y] = [of(left - frame.left, frame.width), of(top - frame.top, frame.height)];
      const mark = element("i");
      Object.assign(mark.style, { left: x, top: y, width: of(width, frame.width), height: of(height, frame.height) });
      return mark;
    });
  }
  const seen = element("b");
  const [left, top] = [canvas.scrollLeft * scale, canvas.scrollTop * scale];
  const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale];
  Object.assign(seen.style, { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
  byId("map").replaceChildren(...view.marks, seen);
}

function startSizes() {
  const observer = new ResizeObserver(() => state.isFitted && fit());
  for (const { side } of shownViews()) {
    const canvas = byId(side);
    observer.observe(canvas);
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // without a key, it scrolls
      event.preventDefault();
      zoomBy(event.deltaY < 0 ? 1.1 : 1 / 1.1);
    }, { passive: false });
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons === 1 && event.pointerType === "mouse") canvas.scrollBy(-event.movementX, -event.movementY);
    });
  }
  byId("after").addEventListener("scroll", showMap);
  const go = ({ offsetX, offsetY, buttons, target }) => {
    if (buttons !== 1 || target !== byId("map")) return;
    const canvas = byId("after");
    const scale = canvas.querySelector("svg").clientWidth / byId("map").clientWidth;
    canvas.scrollTo(offsetX * scale - canvas.clientWidth / 2, offsetY * scale - canvas.clientHeight / 2);
  };
  byId("map").addEventListener("pointerdown", go);
  byId("map").addEventListener("pointermove", go);
  byId("zoom-in").addEventListener("click", () => zoomBy(1.25));
  byId("zoom-out").addEventListener("click", () => zoomBy(0.8));
  byId("zoom-fit").addEventListener("click", fit);
}
