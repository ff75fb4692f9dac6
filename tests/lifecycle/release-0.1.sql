PRAGMA user_version=1;
BEGIN TRANSACTION;
CREATE TABLE sandboxes (
            id TEXT PRIMARY KEY, state TEXT, reason TEXT, message TEXT, changed_at REAL, created_at REAL,
            expires_at REAL, image TEXT, entrypoint TEXT, runtime TEXT, metadata TEXT, extensions TEXT, platform TEXT,
            policy_name TEXT, network_policy TEXT, policy_digest TEXT, credential_proxy INTEGER,
            secure_access INTEGER, vault TEXT, lineage TEXT, renew_seconds INTEGER
        ) STRICT;
INSERT INTO "sandboxes" VALUES('sbx-000000000000000000000001','Running','CONTAINER_RUNNING','Sandbox container started successfully.',1795569601.25,1795569600.5,1795573200.5,'sallyport/base','["sleep", "infinity"]','runsc','{"team": "treasury", "note": "gr\u00fc\u00dfe"}','{"sallyport.policy": "agents"}','{"os": "linux", "arch": "amd64"}','agents','{"defaultAction": "deny", "egress": [{"action": "allow", "target": "api.example.org"}]}','abababababababababababababababababababababababababababababababab',1,1,'{"revision": 2, "credentials": {"one": 1}, "bindings": []}','sbx-000000000000000000000001',600);
INSERT INTO "sandboxes" VALUES('sbx-000000000000000000000002','Stopping','CLEANUP_PENDING','it''s "left"',1795569700.0,1795569650.0,NULL,'sallyport/base','["true"]','runc','{}','{}',NULL,NULL,NULL,'',0,0,NULL,'sbx-000000000000000000000002',NULL);
CREATE INDEX sandboxes_created ON sandboxes (created_at DESC, id);
CREATE INDEX sandboxes_expires ON sandboxes (expires_at) WHERE expires_at IS NOT NULL;
COMMIT;
