// node main.mjs generate PROMPT [MAX_NEW_TOKENS] | status | bytes PROMPT [MAX_NEW_TOKENS]
import { connect, DaemonError, pack } from './deepinfer.mjs'

async function generate(fields) {
  const client = await connect()
  const control = new AbortController()
  process.once('SIGINT', () => control.abort()) // a second Ctrl-C ends the process
  try {
    for await (const event of client.generate(fields, { signal: control.signal })) {
      if (event.event === 'token') process.stdout.write(event.text)
      if (event.event === 'done') {
        const { prompt_tokens, completion_tokens } = event.usage
        console.error(`\n${event.finish_reason}: ${prompt_tokens} prompt tokens, ${completion_tokens} new tokens`)
      }
    }
  } finally {
    client.close()
  }
}

async function status() {
  const client = await connect()
  try {
    console.log(JSON.stringify(await client.request('status')))
  } finally {
    client.close()
  }
}

const [command, prompt, maxNewTokens] = process.argv.slice(2)
const fields = { prompt, max_new_tokens: maxNewTokens && Number(maxNewTokens) }
try {
  if (command === 'status') await status()
  else if (command === 'generate' && prompt) await generate(fields)
  else if (command === 'bytes' && prompt) console.log(Buffer.from(pack('generate', 'a', fields)).toString('hex'))
  else throw new Error('usage: node main.mjs generate PROMPT [MAX_NEW_TOKENS] | status | bytes PROMPT [MAX_NEW_TOKENS]')
} catch (error) {
  console.error(error instanceof DaemonError ? `error ${error.code}: ${error.message}` : error.message)
  process.exitCode = 1
}
