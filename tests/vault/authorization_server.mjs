// oidc-provider with refresh tokens that rotate: authorization_server.mjs MODULES CERTIFICATE KEY PORT SECONDS SECRET
// Access tokens live for SECONDS. The client `public` has no secret, the client `confidential` has SECRET. A refresh token
// that is used twice revokes its login.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createServer } from "node:https";
import { pathToFileURL } from "node:url";

const [modules, certificate, key, port, seconds, secret] = process.argv.slice(2);
const { Provider } = await import(pathToFileURL(createRequire(`${modules}/`).resolve("oidc-provider")));
const client = {
  grant_types: ["authorization_code", "refresh_token"],
  redirect_uris: ["https://operator.invalid/back"],
  response_types: ["code"],
};
const provider = new Provider(`https://127.0.0.1:${port}`, {
  clients: [
    { ...client, client_id: "public", token_endpoint_auth_method: "none" },
    {
      ...client,
      client_id: "confidential",
      client_secret: secret,
      grant_types: [...client.grant_types, "client_credentials"],
      token_endpoint_auth_method: "client_secret_basic",
    },
  ],
  features: {
    clientCredentials: { enabled: true },
    introspection: { enabled: true, allowedPolicy: () => true },
    revocation: { enabled: true },
  },
  findAccount: (_context, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
  issueRefreshToken: () => true,
  rotateRefreshToken: true,
  ttl: { AccessToken: Number(seconds), ClientCredentials: Number(seconds) },
});
createServer({ cert: readFileSync(certificate), key: readFileSync(key) }, provider.callback()).listen(
  Number(port),
  "127.0.0.1",
  () => console.log("ready"),
);
