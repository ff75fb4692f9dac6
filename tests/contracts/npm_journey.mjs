// What a user of the npm SDK does with one sandbox; prints what came of it as one JSON object.
// Arguments: server, API key, runtime, host that may be reached, host that is bound to a secret, the secret.
import { ConnectionConfig, Sandbox, SandboxApiException, SandboxManager } from "@alibaba-group/opensandbox";

const [domain, apiKey, runtime, open, bound, secret] = process.argv.slice(2);
const connectionConfig = new ConnectionConfig({ domain, apiKey });
const seen = {};
const refused = async (call) => {
  try {
    await call();
  } catch (error) {
    if (error instanceof SandboxApiException) return [error.statusCode, error.error.code];
    throw error;
  }
  return "not refused";
};
const text = (execution, stream = "stdout") => execution.logs[stream].map((message) => message.text).join("");

const isolation = runtime === "runsc" ? { "bootstrap.execd.isolation": "enable" } : {};
const sandbox = await Sandbox.create({
  connectionConfig,
  image: "sallyport/base",
  timeoutSeconds: 600,
  env: { GREETING: "hello" },
  metadata: { made: "by-npm" },
  resource: { cpu: "1", memory: "512Mi" },
  networkPolicy: { defaultAction: "deny", egress: [{ action: "allow", target: open }] },
  credentialProxy: { enabled: true },
  extensions: { "sallyport.runtime": runtime, ...isolation },
});
const manager = SandboxManager.create({ connectionConfig });
try {
  const { commands, files, credentialVault: vault } = sandbox;
  const before = await sandbox.getInfo();
  const renewed = await sandbox.renew(3600);
  seen.info = [before.status.state, before.metadata, renewed.expiresAt > before.expiresAt];
  seen.health = [await sandbox.isHealthy(), (await sandbox.getMetrics()).memoryTotalMiB];
  seen.metadata = (await sandbox.patchMetadata({ more: "yes", made: null })).metadata;
  const listed = await manager.listSandboxInfos({ states: ["Running"], metadata: { more: "yes" }, pageSize: 5 });
  seen.listed = [listed.items.map((item) => item.id === sandbox.id), listed.pagination.totalItems];

  const told = [];
  const ran = await commands.run('echo "$GREETING"; echo bad >&2; exit 3', {}, {
    onStdout: (message) => { told.push(message.text); },
    onError: (error) => { told.push(error.value); },
  });
  seen.run = [text(ran), text(ran, "stderr"), ran.exitCode, told];
  const other = await commands.run("pwd; echo $EXTRA; id -u", { workingDirectory: "/usr", envs: { EXTRA: "x" }, uid: 65534 });
  seen.options = text(other);
  seen.timeout = (await commands.run("sleep 60", { timeoutSeconds: 1 })).exitCode;
  const streamed = [];
  for await (const event of commands.runStream("echo one; echo two")) streamed.push(event);
  seen.streamed = streamed.filter((event) => event.type === "stdout").map((event) => event.text);

  const behind = await commands.run("echo begun; sleep 60", { background: true });
  let logs = { content: "", cursor: 0 };
  while (logs.content === "") logs = await commands.getBackgroundCommandLogs(behind.id);
  seen.logs = [logs, (await commands.getCommandStatus(behind.id)).running];
  await commands.interrupt(behind.id);
  let status = await commands.getCommandStatus(behind.id);
  while (status.running) status = await commands.getCommandStatus(behind.id);
  seen.interrupted = status.exitCode;
  const session = await commands.createSession({ workingDirectory: "/usr" });
  await commands.runInSession(session, "KEPT=7; cd /tmp");
  seen.session = (await commands.runInSession(session, "echo $KEPT; pwd")).logs.stdout.map((message) => message.text);
  await commands.deleteSession(session);

  async function* blocks() {
    for (let block = 0; block < 40; block++) yield new Uint8Array(100_000).fill(block);
  }
  await files.createDirectories([{ path: "/tmp/demo", mode: 755 }]);
  await files.writeFiles([
    { path: "/tmp/demo/hello.txt", data: "Hello Wörld", mode: 640 },
    { path: "/tmp/demo/bytes", data: new Uint8Array([0, 1, 255]) },
    { path: "/tmp/demo/lines", data: "a\nb\nc\nd\n" },
  ]);
  await files.writeFiles([{ path: "/tmp/demo/stream", data: blocks() }]);
  let size = 0, sum = 0;
  for await (const chunk of files.readBytesStream("/tmp/demo/stream")) {
    size += chunk.length;
    for (const byte of chunk) sum += byte;
  }
  seen.streamedFile = [size, sum];
  seen.read = [
    await files.readFile("/tmp/demo/hello.txt"),
    await files.readFile("/tmp/demo/hello.txt", { range: "bytes=0-4" }),
    await files.readFile("/tmp/demo/lines", { offset: 2, limit: 2 }),
    Array.from(await files.readBytes("/tmp/demo/bytes")),
  ];
  seen.replaced = await files.replaceContentsDetailed([{ path: "/tmp/demo/hello.txt", oldContent: "Hello", newContent: "Bye" }]);
  await files.setPermissions([{ path: "/tmp/demo/hello.txt", mode: 600, owner: "nobody", group: "nogroup" }]);
  await files.moveFiles([{ src: "/tmp/demo/hello.txt", dest: "/tmp/demo/below/moved.txt" }]);
  const moved = (await files.search({ path: "/tmp/demo", pattern: "*.txt" }))[0];
  seen.moved = [moved.path, moved.mode, moved.owner, moved.group, moved.type];
  await files.deleteFiles(["/tmp/demo/bytes", "/tmp/demo/stream"]);
  seen.left = (await files.listDirectory({ path: "/tmp/demo", depth: 2 })).map((entry) => entry.path);
  await files.deleteDirectories(["/tmp/demo"]);
  seen.gone = await refused(() => files.getFileInfo(["/tmp/demo"]));

  const fetched = (host) => commands.run(`curl -sS -o /dev/null --max-time 20 https://${host}/npm-${sandbox.id}`);
  await fetched(bound);
  await sandbox.patchEgressRules([{ action: "allow", target: bound }]);
  await vault.create({
    credentials: [{ name: "token", source: { value: secret } }],
    bindings: [{ name: "api", match: { hosts: [bound] }, auth: { type: "bearer", credential: "token" } }],
  });
  seen.vault = [(await vault.listCredentials()).length, (await vault.getBinding("api")).auth, JSON.stringify(await vault.get()).includes(secret)];
  await fetched(bound);
  seen.held = await refused(() => sandbox.deleteEgressRules([bound])); // as long as a binding names it
  await vault.delete();
  await sandbox.deleteEgressRules([bound]);
  seen.egress = await sandbox.getEgressPolicy();

  const capabilities = await sandbox.isolation.capabilities();
  seen.isolated = [capabilities.available];
  if (capabilities.available) {
    await files.createDirectories([{ path: "/tmp/work" }]);
    seen.isolated.push(...await sandbox.isolation.withSession({ workspace: { path: "/tmp/work", mode: "overlay" } }, async (inner) => {
      const done = await inner.run("echo layered > note; cat note; exit 2");
      return [text(done), done.exitCode, await inner.files.readFile("/tmp/work/note")];
    }));
    seen.isolated.push(await refused(() => files.readFile("/tmp/work/note")));
  }

  await commands.run("cd /tmp && echo served > page && python3 -m http.server 8000", { background: true });
  const endpoint = await sandbox.getEndpoint(8000);
  let answer = { ok: false };
  while (!answer.ok) answer = await fetch(`${await sandbox.getEndpointUrl(8000)}/page`, { headers: endpoint.headers });
  seen.served = await answer.text();
  const signed = await sandbox.getSignedEndpoint(8000, Math.floor(Date.now() / 1000) + 60);
  seen.signed = await (await fetch(`http://${signed.endpoint}/page`)).text();
  const again = await Sandbox.connect({ connectionConfig, sandboxId: sandbox.id });
  seen.connected = text(await again.commands.run("echo again"));
  await again.close();

  await sandbox.pause();
  seen.paused = [(await sandbox.getInfo()).status.state, await sandbox.isHealthy()];
  const pausedAgain = await refused(() => sandbox.pause());
  const resumed = await sandbox.resume();
  seen.paused.push(text(await resumed.commands.run("echo resumed"))); // it shares the connections of `sandbox`
  await manager.pauseSandbox(sandbox.id);
  seen.paused.push((await manager.getSandboxInfo(sandbox.id)).status.state);
  await manager.resumeSandbox(sandbox.id);
  seen.paused.push(text(await commands.run("echo managed")));

  await files.writeFiles([{ path: "/root/kept", data: "by npm" }]);
  let snapshot = await manager.createSnapshot(sandbox.id, { name: "npm" });
  seen.snapshot = [snapshot.status.state];
  while (snapshot.status.state === "Creating") snapshot = await manager.getSnapshot(snapshot.id);
  seen.snapshot.push(snapshot.status.state, snapshot.name, snapshot.sandboxId === sandbox.id);
  const kept = await manager.listSnapshots({ sandboxId: sandbox.id });
  seen.snapshot.push(kept.items.map((item) => item.id === snapshot.id));
  const restored = await Sandbox.create({
    connectionConfig, snapshotId: snapshot.id, extensions: { "sallyport.runtime": runtime },
  });
  seen.snapshot.push(await restored.files.readFile("/root/kept"));
  seen.snapshot.push(await refused(() => manager.deleteSnapshot(snapshot.id)));
  await restored.kill();
  await restored.close();
  await manager.deleteSnapshot(snapshot.id);
  seen.snapshot.push(await refused(() => manager.getSnapshot(snapshot.id)));

  seen.refused = {
    pause: pausedAgain,
    resume: await refused(() => manager.resumeSandbox(sandbox.id)),
    snapshot: await refused(() => manager.getSnapshot("unknown")),
    image: await refused(() => Sandbox.create({ connectionConfig, image: "unknown:1" })),
    volume: await refused(() => Sandbox.create({
      connectionConfig, image: "sallyport/base", volumes: [{ name: "v", host: { path: "/tmp" }, mountPath: "/mnt" }],
    })),
    key: await refused(() => SandboxManager.create({ connectionConfig: { domain, apiKey: "wrong" } }).listSandboxInfos()),
  };
} finally {
  await sandbox.kill();
}
seen.killed = [await sandbox.isHealthy(), await refused(() => manager.getSandboxInfo(sandbox.id))];
await sandbox.close();
await manager.close();
console.log(JSON.stringify({ id: sandbox.id, ...seen }));
