// A client of deepinfer-daemon: one connection, any number of requests at once.
import { decode, encode } from '@msgpack/msgpack'
import { Dealer } from 'zeromq'
import { readConnection, socketOptions } from './connection.mjs'

const PATIENCE_MS = 3000

/** An `error` event. Programs compare `code`; `retry` says whether the same request may succeed later. */
export class DaemonError extends Error {
  constructor({ message, code, retry, field, allowed, details }) {
    super(message)
    Object.assign(this, { code, retry, field, allowed, details })
  }
}

/** The bytes of a request: one msgpack map. */
export function pack(op, id, fields) {
  return encode({ v: 1, op, id, ...fields }, { ignoreUndefined: true })
}

/** Resolves to a Client when the daemon has let us in. */
export async function connect(connection = readConnection()) {
  const { endpoint, limits } = connection
  // Without `immediate`, a request made while no daemon runs would be executed when one starts.
  const socket = new Dealer({ immediate: true, sendTimeout: PATIENCE_MS, ...socketOptions(connection) })
  let timer
  try {
    await new Promise((resolve, reject) => {
      const refuse = () => reject(new Error(`${endpoint} does not let this client in: are these the right keys?`))
      socket.events.on('handshake', resolve)
      for (const what of ['auth', 'protocol', 'other']) socket.events.on(`handshake:error:${what}`, refuse)
      timer = setTimeout(() => reject(new Error(`nothing answers at ${endpoint}`)), PATIENCE_MS)
      socket.connect(endpoint)
    })
  } catch (error) {
    socket.close()
    throw error
  } finally {
    clearTimeout(timer)
  }
  return new Client(socket, limits?.max_frame_bytes ?? 8 * 1024 * 1024)
}

class Client {
  #socket
  #maxFrameBytes
  #lastId = 0
  #open = new Map() // id -> listener(error, event)
  #sent = Promise.resolve() // a socket sends one message at a time

  constructor(socket, maxFrameBytes) {
    this.#socket = socket
    this.#maxFrameBytes = maxFrameBytes
    // What was open on a connection is lost with it; see "Order" in docs/protocol.md.
    socket.events.on('disconnect', () => this.close(new Error('the daemon is gone')))
    this.#receive().catch((error) => this.close(error))
  }

  /** The data of the reply to `status`, `models`, `tokenize`, ... */
  request(op, fields) {
    return new Promise((resolve, reject) => {
      this.#start(op, fields, (error, event) => (error ? reject(error) : resolve(event.data)))
    })
  }

  /** Yields the events of a stream, `done` last. Abort `signal` to cancel it and see its end, or just leave the loop. */
  async *generate(fields, { signal } = {}) {
    const waiting = [] // [error, event]
    let wake = () => {}
    const id = this.#start('generate', fields, (...arrived) => {
      waiting.push(arrived)
      wake()
    })
    signal?.addEventListener('abort', () => this.#cancel(id), { once: true })
    try {
      for (let seq = 0, ended = false; !ended; ) {
        while (waiting.length === 0) await new Promise((resolve) => (wake = resolve))
        const [error, event] = waiting.shift()
        // Only a refusal has no `seq`; the last event also tells how many there were.
        if (event?.seq !== undefined && (event.seq !== seq++ || (event.events ?? seq) !== seq)) {
          throw new Error('events of this stream are missing')
        }
        if (error) throw error
        yield event
        ended = event.event === 'done'
      }
    } finally {
      this.#cancel(id)
    }
  }

  /** Whatever is still open fails with `error`. */
  close(error = new Error('the client was closed')) {
    const listeners = [...this.#open.values()]
    this.#open.clear()
    this.#socket.close()
    for (const listener of listeners) listener(error)
  }

  #start(op, fields, listener) {
    const id = ++this.#lastId
    const frame = pack(op, id, fields)
    // ZeroMQ would close the connection without a word.
    if (frame.length > this.#maxFrameBytes) throw new RangeError(`${op}: ${frame.length} bytes are too many`)
    this.#open.set(id, listener)
    this.#send(frame)
    return id
  }

  #cancel(id) {
    if (this.#open.has(id)) this.#send(pack('cancel', id))
  }

  #send(frame) {
    this.#sent = this.#sent.then(() => this.#socket.send(frame)).catch((error) => this.close(error))
  }

  /** The one receive loop. It ends when the socket is closed. */
  async #receive() {
    for await (const [frame] of this.#socket) {
      const event = decode(frame)
      const error = event.event === 'error' ? new DaemonError(event) : null
      if (error && event.id === undefined) throw error // it could not even read the id
      const listener = this.#open.get(event.id)
      // Skips streams that have ended, and the reply to a cancel: the stream still ends with its own `done`.
      if (!listener || event.op === 'cancel') continue
      if (['done', 'error', 'reply'].includes(event.event)) this.#open.delete(event.id)
      listener(error, event)
    }
  }
}
