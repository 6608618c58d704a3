// Finds the daemon and what a socket needs to reach it. The rules are in docs/protocol.md, "Finding the daemon".
import { existsSync, readFileSync, statSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

function runtimeFolder(env) {
  if (env.DEEPINFER_RUNTIME_DIR) return env.DEEPINFER_RUNTIME_DIR
  if (env.RUNTIME_DIRECTORY) return env.RUNTIME_DIRECTORY.split(':')[0]
  if (env.XDG_RUNTIME_DIR) return join(env.XDG_RUNTIME_DIR, 'deepinfer-daemon')
  if (process.platform === 'win32') return join(env.LOCALAPPDATA, 'deepinfer-daemon')
  return join(tmpdir(), `deepinfer-daemon-${process.getuid()}`)
}

/** The content of daemon.json. Whoever else can write it could read our prompts: it must be ours, or root's. */
export function readConnection(path = join(runtimeFolder(process.env), 'daemon.json')) {
  if (!existsSync(path)) throw new Error(`no daemon is running: there is no connection file ${path}`)
  const owner = statSync(path).uid
  if (process.getuid && ![0, process.getuid()].includes(owner)) throw new Error(`${path} belongs to another user`)
  return JSON.parse(readFileSync(path, 'utf8'))
}

/** Socket options. Keys are in the file where clients need them; sockets in the daemon's own folder have none. */
export function socketOptions({ curve }) {
  const keys = curve && {
    curveServerKey: curve.server_key, // the daemon's public key
    curvePublicKey: curve.public_key, // our own pair
    curveSecretKey: curve.secret_key,
  }
  const heartbeats = { heartbeatInterval: 2000, heartbeatTimeout: 6000, heartbeatTimeToLive: 6000 }
  return { linger: 0, ...heartbeats, ...keys }
}
