// Prints what a daemon publishes: node metrics_subscriber.mjs [TOPIC ...]. See docs/metrics.md.
import { randomBytes } from 'node:crypto'
import { decode } from '@msgpack/msgpack'
import { Subscriber } from 'zeromq'
import { readConnection, socketOptions } from './connection.mjs'

const { metrics_endpoint: endpoint, curve } = readConnection()
const socket = new Subscriber(socketOptions(endpoint.startsWith('ipc:') ? {} : { curve }))
socket.connect(endpoint)
const topics = process.argv.slice(2)
if (topics.length === 0) topics.push('metrics', 'events', 'requests', `replay/${randomBytes(8).toString('hex')}`)
socket.subscribe(...topics)
const expected = {}
for await (const [topic, frame] of socket) {
  const [name, message] = [topic.toString(), decode(frame)]
  const lost = message.seq - (expected[name] ?? message.seq)
  if (lost > 0) console.log(`${name}: ${lost} messages lost`)
  expected[name] = message.seq + 1
  console.log(name, JSON.stringify(message))
}
