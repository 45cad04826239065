// What nats.js sees: checks by name, as in python_client.py. Usage: node checks.mjs <package> <url> <subject>; prints one
// JSON object.
const [name, servers, root] = process.argv.slice(2);
// Node has a WebSocket of its own from version 22 on.
if (servers.startsWith("ws:")) globalThis.WebSocket ??= (await import("ws")).WebSocket;
const library = await import(name);
const connect = library.wsconnect ?? library.connect;
const headers = library.headers;
const codec = { encode: (text) => new TextEncoder().encode(text), decode: (data) => new TextDecoder().decode(data) };
const PATIENCE_MS = 20000;
const HANG_MS = 10000;

async function connected(work, options = {}) {
  const client = await connect({ servers, reconnect: false, timeout: PATIENCE_MS, ...options });
  try {
    return await work(client);
  } finally {
    if (!client.isClosed()) await client.close();
  }
}

function receive(client, subject, options = {}) {
  const data = [];
  const subscription = client.subscribe(subject, {
    ...options,
    callback: (error, message) => data.push(error ? error.message : codec.decode(message.data)),
  });
  return { data, subscription };
}

function publish(client, subject, count) {
  for (let number = 0; number < count; number++) client.publish(subject, codec.encode(`${number}`));
}

// A promise that never settles would end node, as nothing is left to do.
async function bounded(work) {
  let timer;
  const expired = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error("no answer")), HANG_MS);
  });
  try {
    return await Promise.race([work, expired]);
  } finally {
    clearTimeout(timer);
  }
}

async function fails(work) {
  try {
    await work;
    return null;
  } catch (error) {
    return error.code ?? error.name;
  }
}

const checks = {
  drain_a_subscription: (subject) =>
    connected(async (client) => {
      const { data, subscription } = receive(client, subject);
      publish(client, subject, 100);
      await subscription.drain();
      return data;
    }),
  drain_a_connection: (subject) =>
    connected(async (client) => {
      const { data } = receive(client, subject);
      publish(client, subject, 100);
      await client.drain();
      return data;
    }),
  drain_what_another_published: (subject) =>
    connected((client) =>
      connected(async (other) => {
        const { data, subscription } = receive(client, subject);
        await client.flush();
        publish(other, subject, 1000);
        await other.flush();
        await subscription.drain();
        return data;
      }),
    ),
  unsubscribe_after_max: (subject) =>
    connected(async (client) => {
      const { data, subscription } = receive(client, subject);
      subscription.unsubscribe(3);
      publish(client, subject, 5);
      await client.flush();
      return data;
    }),
  flush_then_next: (subject) =>
    connected(async (client) => {
      const { data } = receive(client, subject);
      publish(client, subject, 1);
      await client.flush();
      return data;
    }),
  request: (subject) =>
    connected((client) =>
      connected(async (service) => {
        service.subscribe(subject, { callback: (_, message) => message.respond(message.data) });
        await service.flush();
        const answer = await client.request(subject, codec.encode("hello"), { timeout: PATIENCE_MS });
        return codec.decode(answer.data);
      }),
    ),
  no_responders: (subject) =>
    connected((client) => fails(client.request(subject, codec.encode(""), { timeout: PATIENCE_MS }))),
  no_responders_but_oneself: (subject) =>
    connected(
      async (client) => {
        client.subscribe(subject, { callback: () => {} });
        await client.flush();
        return fails(client.request(subject, codec.encode(""), { timeout: 2000 }));
      },
      { noEcho: true },
    ),
  headers: (subject) =>
    connected(async (client) => {
      const subscription = client.subscribe(subject, { max: 1 });
      const block = headers();
      block.append("A", "1");
      block.append("A", "2");
      client.publish(subject, codec.encode("hello"), { headers: block });
      for await (const message of subscription) return [codec.decode(message.data), message.headers.values("A")];
    }),
  queue_group: (subject) =>
    connected((one) =>
      connected(async (two) => {
        const members = [one, one, two].map((client) => receive(client, subject, { queue: "workers" }));
        await one.flush();
        await two.flush();
        publish(one, subject, 100);
        await one.flush();
        await one.drain();
        await two.drain();
        return members.flatMap((member) => member.data).sort();
      }),
    ),
  invalid_subjects: (subject) =>
    connected(async (client) => {
      client.publish(`${subject}..x`);
      client.publish(`${subject}.*`);
      return [await fails(client.flush()), client.isClosed()];
    }),
  service: (subject) =>
    connected((client) =>
      connected(async (other) => {
        const added = await client.services.add({ name: "echo", version: "1.0.0" });
        added.addEndpoint("echo", { subject, handler: (_, message) => message.respond(message.data) });
        await client.flush();
        const answer = await fails(other.request(subject, codec.encode("hello"), { timeout: 2000 }));
        return [answer, await fails(other.request("$SRV.PING.echo", codec.encode(""), { timeout: 2000 }))];
      }),
    ),
};

// Version 3 has services in a package of their own.
if (name === "@nats-io/nats-core") delete checks.service;

const found = {};
for (const [name, check] of Object.entries(checks)) {
  try {
    found[name] = await bounded(check(`${root}.${name}`));
  } catch (error) {
    found[name] = `failed: ${error.code ?? error.name}`;
  }
}
console.log(JSON.stringify(found));
process.exit(0);
