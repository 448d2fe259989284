-- a store as the code of schema 1 left it: one trial that ended well, one out of memory
PRAGMA application_id=1685086830;
PRAGMA user_version=1;
BEGIN TRANSACTION;
CREATE TABLE memory (
        trial_id INTEGER NOT NULL REFERENCES trial(id), device INTEGER NOT NULL, peak_bytes INTEGER NOT NULL,
        source TEXT NOT NULL
    );
INSERT INTO "memory" VALUES(1,0,300,'allocator');
INSERT INTO "memory" VALUES(1,1,100,'allocator');
INSERT INTO "memory" VALUES(1,-1,1000,'rss');
CREATE TABLE run (
        id TEXT PRIMARY KEY, plan TEXT NOT NULL, host TEXT NOT NULL, code TEXT NOT NULL, status TEXT NOT NULL,
        started REAL NOT NULL, ended REAL, rounds INTEGER NOT NULL, pid INTEGER NOT NULL, pid_born REAL NOT NULL,
        provenance TEXT NOT NULL
    );
INSERT INTO "run" VALUES('f7800a7302f24aea96352b0e3ae227b4','plan','host','code','finished',1.79527660166324567799e+09,1.79527660166560935972e+09,1,14058,1795276601.32,'{"command": "run"}');
CREATE TABLE series (
        trial_id INTEGER NOT NULL REFERENCES trial(id), device INTEGER NOT NULL, metric TEXT NOT NULL,
        n INTEGER NOT NULL, mean REAL NOT NULL, peak REAL NOT NULL, times BLOB NOT NULL, readings BLOB NOT NULL,
        PRIMARY KEY (trial_id, device, metric)
    ) WITHOUT ROWID
    ;
INSERT INTO "series" VALUES(1,0,'busy_s',3,1.00000000000000019428e-01,0.1,X'789C63600001150730C5A006A5351C000B2C0133',X'789C9B35130476DACF42A301ADD60DAE');
INSERT INTO "series" VALUES(1,1,'busy_s',3,2.00000000000000038857e-01,0.2,X'789C63600001150730C5A006A5351C000B2C0133',X'789C9B3513044EDACF42A301AFB60DDE');
CREATE TABLE span (
        trial_id INTEGER NOT NULL REFERENCES trial(id), number INTEGER NOT NULL, step INTEGER NOT NULL,
        phase TEXT NOT NULL, device INTEGER NOT NULL, clock TEXT NOT NULL, start_s REAL NOT NULL, end_s REAL NOT NULL,
        PRIMARY KEY (trial_id, number)
    ) WITHOUT ROWID;
INSERT INTO "span" VALUES(1,0,0,'forward',0,'host',9.75,9.9);
INSERT INTO "span" VALUES(1,1,0,'forward',1,'host',9.75,9.9);
INSERT INTO "span" VALUES(1,2,1,'forward',0,'host',10.75,10.9);
INSERT INTO "span" VALUES(1,3,1,'forward',1,'host',10.75,10.9);
INSERT INTO "span" VALUES(1,4,2,'forward',0,'host',11.75,11.9);
INSERT INTO "span" VALUES(1,5,2,'forward',1,'host',11.75,11.9);
CREATE TABLE step (
        trial_id INTEGER NOT NULL REFERENCES trial(id), step INTEGER NOT NULL, seconds REAL NOT NULL,
        warmup INTEGER NOT NULL, end_s REAL NOT NULL, PRIMARY KEY (trial_id, step)
    ) WITHOUT ROWID;
INSERT INTO "step" VALUES(1,0,0.25,1,10.0);
INSERT INTO "step" VALUES(1,1,0.25,0,11.0);
INSERT INTO "step" VALUES(1,2,0.25,0,12.0);
CREATE TABLE trial (
        id INTEGER PRIMARY KEY, run_id TEXT NOT NULL REFERENCES run(id), fingerprint TEXT NOT NULL,
        round INTEGER NOT NULL, case_json TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
        verified TEXT, source TEXT, started REAL, schema INTEGER, setup TEXT, provenance TEXT
    );
INSERT INTO "trial" VALUES(1,'f7800a7302f24aea96352b0e3ae227b4','a3c33c4e170c1896f2aeb84cb00b0e7221356548f842db20f9b2966cda8f8c45',0,'{"model": "mlp", "strategy": "dp", "batch_size": 64, "devices": 2, "schedule": "reference"}','ok','','bitwise','measured',1.79527660166347146036e+09,1,'{"verify_s": 1.5}','{"torch": "2.13.0"}');
INSERT INTO "trial" VALUES(2,'f7800a7302f24aea96352b0e3ae227b4','cf2a2abb0c134a76c1b7472d0e3c91ad2b16e84d9868f46b93842843fdf63aef',0,'{"model": "mlp", "strategy": "dp", "batch_size": 4096, "devices": 2, "schedule": "reference"}','oom','out of memory on device cuda:1; use a smaller batch, or more devices','not_applicable','measured',1.79527660166489839554e+09,1,'{}','{}');
CREATE INDEX trial_slot ON trial(run_id, fingerprint, round);
COMMIT;
