// A client that is told to leave one server, and goes on at another: what it reports, a line each.
import { connect } from "nats";

const [, , one, other, subject] = process.argv;
const client = await connect({ servers: [one, other], noRandomize: true, reconnectTimeWait: 10 });
const received = client.subscribe(subject)[Symbol.asyncIterator]();
await client.flush();
console.log("ready");
for await (const status of client.status()) {
  if (status.type === "ldm") console.log("ldm");
  if (status.type === "reconnect") break;
}
console.log(client.getServer() === other ? "moved" : client.getServer());
await client.flush();
client.publish(subject, "hello");
console.log((await received.next()).value.string());
await client.close();
