// Search without a server: browsers refuse workers to pages that were opened from a folder. There an invisible frame
// runs the worker's script, and messages go to and fro as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.appendChild(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.ready = new Promise((done) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = () => done(inside);
        frame.contentDocument.body.appendChild(script);
      });
      this.frame = frame;
    }
    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
