// Search in pages that are opened as files: a browser starts no Worker there, so its script runs in a hidden frame.
// The theme's plugin `offline` would fetch such a file from elsewhere, unless one of this name is there (mkdocs.yml).
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.started = new Promise((resolve) => {
        frame.onload = () => {
          frame.onload = null
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = frame.contentDocument.createElement("script")
          script.onload = () => resolve(frame.contentWindow)
          script.src = url
          frame.contentDocument.head.append(script)
        }
      })
      document.body.append(frame)
    }

    async postMessage(data) {
      (await this.started).dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
