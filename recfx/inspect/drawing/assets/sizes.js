// --- sizes: whole graphs fill their places, until the user zooms

const shownViews = () => Object.values(views).filter((view) => view !== null);

function resize(side) {
  const svg = byId(side).querySelector("svg");
  svg.setAttribute("width", views[side].width * state.zoom[side]);
  svg.setAttribute("height", views[side].height * state.zoom[side]);
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
  on("zoom-in", "click", () => zoomBy(1.25));
  on("zoom-out", "click", () => zoomBy(0.8));
  on("zoom-fit", "click", fit);
}
