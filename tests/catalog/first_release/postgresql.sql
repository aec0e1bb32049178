CREATE TABLE catalog (
  id VARCHAR COLLATE "C" NOT NULL,
  created TIMESTAMP WITH TIME ZONE NOT NULL,
  CONSTRAINT pk_catalog PRIMARY KEY (id)
);
CREATE TABLE config (
  id SERIAL NOT NULL,
  hash VARCHAR COLLATE "C" NOT NULL,
  document JSONB NOT NULL,
  CONSTRAINT pk_config PRIMARY KEY (id),
  CONSTRAINT uq_config_hash UNIQUE (hash)
);
CREATE TABLE digest (
  block INTEGER NOT NULL,
  digest TEXT COLLATE "C" NOT NULL,
  checkpoint INTEGER NOT NULL,
  position INTEGER NOT NULL,
  CONSTRAINT pk_digest PRIMARY KEY (block, digest, checkpoint, position)
);
CREATE TABLE launch (
  id SERIAL NOT NULL,
  name VARCHAR COLLATE "C" NOT NULL,
  family INTEGER,
  CONSTRAINT pk_launch PRIMARY KEY (id),
  CONSTRAINT uq_launch_name UNIQUE (name)
);
CREATE INDEX ix_launch_family ON launch (family);
CREATE TABLE run (
  id SERIAL NOT NULL,
  name VARCHAR COLLATE "C" NOT NULL,
  created TIMESTAMP WITH TIME ZONE NOT NULL,
  CONSTRAINT pk_run PRIMARY KEY (id),
  CONSTRAINT uq_run_name UNIQUE (name)
);
CREATE TABLE tensor_set (
  id SERIAL NOT NULL,
  hash VARCHAR COLLATE "C" NOT NULL,
  CONSTRAINT pk_tensor_set PRIMARY KEY (id),
  CONSTRAINT uq_tensor_set_hash UNIQUE (hash)
);
CREATE TABLE checkpoint (
  serial SERIAL NOT NULL,
  id VARCHAR COLLATE "C" NOT NULL,
  kind VARCHAR COLLATE "C" NOT NULL,
  state VARCHAR COLLATE "C" NOT NULL,
  run_id INTEGER,
  launch_id INTEGER,
  step BIGINT,
  commits BIGINT,
  created TIMESTAMP WITH TIME ZONE NOT NULL,
  recorded TIMESTAMP WITH TIME ZONE NOT NULL,
  deleted TIMESTAMP WITH TIME ZONE,
  purge_after TIMESTAMP WITH TIME ZONE,
  deleted_clocks JSONB,
  tensors INTEGER NOT NULL,
  nbytes BIGINT NOT NULL,
  files INTEGER,
  files_nbytes BIGINT,
  format_version INTEGER,
  content VARCHAR COLLATE "C",
  attempt VARCHAR COLLATE "C",
  engine VARCHAR COLLATE "C",
  producer JSONB NOT NULL,
  topology JSONB NOT NULL,
  config_id INTEGER,
  tensor_set_id INTEGER NOT NULL,
  digest_block INTEGER NOT NULL,
  document_revision INTEGER NOT NULL,
  document_written INTEGER NOT NULL,
  document_due INTEGER GENERATED ALWAYS AS (document_revision - document_written) STORED NOT NULL,
  CONSTRAINT pk_checkpoint PRIMARY KEY (serial),
  CONSTRAINT uq_checkpoint_id UNIQUE (id),
  CONSTRAINT fk_checkpoint_run_id_run FOREIGN KEY(run_id) REFERENCES run (id),
  CONSTRAINT fk_checkpoint_launch_id_launch FOREIGN KEY(launch_id) REFERENCES launch (id),
  CONSTRAINT fk_checkpoint_config_id_config FOREIGN KEY(config_id) REFERENCES config (id),
  CONSTRAINT fk_checkpoint_tensor_set_id_tensor_set FOREIGN KEY(tensor_set_id) REFERENCES tensor_set (id)
);
CREATE INDEX ix_checkpoint_config_id ON checkpoint (config_id);
CREATE INDEX ix_checkpoint_digest_block ON checkpoint (digest_block);
CREATE INDEX ix_checkpoint_document_due ON checkpoint (document_due);
CREATE INDEX ix_checkpoint_launch_id ON checkpoint (launch_id);
CREATE INDEX ix_checkpoint_run_id_commits ON checkpoint (run_id, commits);
CREATE INDEX ix_checkpoint_run_id_state_created_step_nbytes_files_nbytes ON checkpoint (run_id, state, created, step, nbytes, files_nbytes);
CREATE INDEX ix_checkpoint_run_id_step ON checkpoint (run_id, step);
CREATE INDEX ix_checkpoint_state_created ON checkpoint (state, created);
CREATE INDEX ix_checkpoint_tensor_set_id ON checkpoint (tensor_set_id);
CREATE TABLE continuation (
  launch INTEGER NOT NULL,
  continued INTEGER NOT NULL,
  position BIGINT NOT NULL,
  CONSTRAINT pk_continuation PRIMARY KEY (launch, continued),
  CONSTRAINT fk_continuation_launch_launch FOREIGN KEY(launch) REFERENCES launch (id) ON DELETE CASCADE,
  CONSTRAINT fk_continuation_continued_launch FOREIGN KEY(continued) REFERENCES launch (id) ON DELETE CASCADE
);
CREATE INDEX ix_continuation_continued ON continuation (continued);
CREATE TABLE tensor (
  tensor_set_id INTEGER NOT NULL,
  position INTEGER NOT NULL,
  name VARCHAR COLLATE "C" NOT NULL,
  state VARCHAR COLLATE "C" NOT NULL,
  dtype VARCHAR COLLATE "C" NOT NULL,
  shape VARCHAR COLLATE "C" NOT NULL,
  chunk VARCHAR COLLATE "C",
  shard VARCHAR COLLATE "C",
  nbytes BIGINT NOT NULL,
  CONSTRAINT pk_tensor PRIMARY KEY (tensor_set_id, position),
  CONSTRAINT fk_tensor_tensor_set_id_tensor_set FOREIGN KEY(tensor_set_id) REFERENCES tensor_set (id) ON DELETE CASCADE
);
CREATE INDEX ix_tensor_name_state ON tensor (name, state);
CREATE TABLE alias (
  name VARCHAR COLLATE "C" NOT NULL,
  checkpoint INTEGER NOT NULL,
  version INTEGER NOT NULL,
  moved TIMESTAMP WITH TIME ZONE NOT NULL,
  document_url VARCHAR COLLATE "C",
  CONSTRAINT pk_alias PRIMARY KEY (name),
  CONSTRAINT fk_alias_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE CASCADE
);
CREATE INDEX ix_alias_checkpoint ON alias (checkpoint);
CREATE TABLE alias_claim (
  checkpoint INTEGER NOT NULL,
  name VARCHAR COLLATE "C" NOT NULL,
  document_url VARCHAR COLLATE "C" NOT NULL,
  version INTEGER NOT NULL,
  moved TIMESTAMP WITH TIME ZONE NOT NULL,
  CONSTRAINT pk_alias_claim PRIMARY KEY (checkpoint, name, document_url),
  CONSTRAINT fk_alias_claim_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE CASCADE
);
CREATE TABLE alias_move (
  id SERIAL NOT NULL,
  name VARCHAR COLLATE "C" NOT NULL,
  version INTEGER NOT NULL,
  source INTEGER,
  target INTEGER,
  moved TIMESTAMP WITH TIME ZONE NOT NULL,
  who VARCHAR COLLATE "C" NOT NULL,
  CONSTRAINT pk_alias_move PRIMARY KEY (id),
  CONSTRAINT fk_alias_move_source_checkpoint FOREIGN KEY(source) REFERENCES checkpoint (serial) ON DELETE SET NULL,
  CONSTRAINT fk_alias_move_target_checkpoint FOREIGN KEY(target) REFERENCES checkpoint (serial) ON DELETE SET NULL
);
CREATE UNIQUE INDEX ix_alias_move_name_version ON alias_move (name, version);
CREATE INDEX ix_alias_move_source ON alias_move (source);
CREATE INDEX ix_alias_move_target ON alias_move (target);
CREATE TABLE certificate (
  id SERIAL NOT NULL,
  checkpoint INTEGER NOT NULL,
  url VARCHAR COLLATE "C" NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  ok BOOLEAN NOT NULL,
  document JSONB NOT NULL,
  CONSTRAINT pk_certificate PRIMARY KEY (id),
  CONSTRAINT fk_certificate_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE CASCADE
);
CREATE INDEX ix_certificate_checkpoint ON certificate (checkpoint);
CREATE TABLE edge (
  id SERIAL NOT NULL,
  child INTEGER NOT NULL,
  parent INTEGER,
  parent_id VARCHAR COLLATE "C",
  parent_url VARCHAR COLLATE "C" NOT NULL,
  kind VARCHAR COLLATE "C" NOT NULL,
  depends BOOLEAN NOT NULL,
  how JSONB,
  CONSTRAINT pk_edge PRIMARY KEY (id),
  CONSTRAINT fk_edge_child_checkpoint FOREIGN KEY(child) REFERENCES checkpoint (serial) ON DELETE CASCADE,
  CONSTRAINT fk_edge_parent_checkpoint FOREIGN KEY(parent) REFERENCES checkpoint (serial) ON DELETE SET NULL
);
CREATE UNIQUE INDEX ix_edge_child_kind_parent_url ON edge (child, kind, parent_url);
CREATE INDEX ix_edge_depends ON edge (depends);
CREATE INDEX ix_edge_parent ON edge (parent);
CREATE INDEX ix_edge_parent_id ON edge (parent_id);
CREATE INDEX ix_edge_parent_url ON edge (parent_url);
CREATE TABLE event (
  id SERIAL NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  who VARCHAR COLLATE "C" NOT NULL,
  action VARCHAR COLLATE "C" NOT NULL,
  checkpoint INTEGER,
  detail JSONB NOT NULL,
  CONSTRAINT pk_event PRIMARY KEY (id),
  CONSTRAINT fk_event_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE SET NULL
);
CREATE INDEX ix_event_checkpoint ON event (checkpoint);
CREATE TABLE form (
  checkpoint INTEGER NOT NULL,
  manifest VARCHAR COLLATE "C" NOT NULL,
  CONSTRAINT pk_form PRIMARY KEY (checkpoint, manifest),
  CONSTRAINT fk_form_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE CASCADE
);
CREATE TABLE hold (
  id SERIAL NOT NULL,
  checkpoint INTEGER NOT NULL,
  reason VARCHAR COLLATE "C" NOT NULL,
  until TIMESTAMP WITH TIME ZONE,
  created TIMESTAMP WITH TIME ZONE NOT NULL,
  who VARCHAR COLLATE "C" NOT NULL,
  released TIMESTAMP WITH TIME ZONE,
  document_url VARCHAR COLLATE "C",
  CONSTRAINT pk_hold PRIMARY KEY (id),
  CONSTRAINT fk_hold_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE CASCADE
);
CREATE INDEX ix_hold_checkpoint ON hold (checkpoint);
CREATE TABLE location (
  id SERIAL NOT NULL,
  checkpoint INTEGER NOT NULL,
  url VARCHAR COLLATE "C" NOT NULL,
  seen TIMESTAMP WITH TIME ZONE NOT NULL,
  listing VARCHAR COLLATE "C",
  deleted TIMESTAMP WITH TIME ZONE,
  purge_after TIMESTAMP WITH TIME ZONE,
  spared BOOLEAN DEFAULT false NOT NULL,
  CONSTRAINT pk_location PRIMARY KEY (id),
  CONSTRAINT fk_location_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE CASCADE,
  CONSTRAINT uq_location_url UNIQUE (url)
);
CREATE INDEX ix_location_checkpoint ON location (checkpoint);
CREATE TABLE metric (
  checkpoint INTEGER NOT NULL,
  name VARCHAR COLLATE "C" NOT NULL,
  value FLOAT(53),
  measured TIMESTAMP WITH TIME ZONE NOT NULL,
  document_url VARCHAR COLLATE "C",
  CONSTRAINT pk_metric PRIMARY KEY (checkpoint, name),
  CONSTRAINT fk_metric_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE CASCADE
);
CREATE INDEX ix_metric_name_value ON metric (name, value);
CREATE TABLE note (
  id SERIAL NOT NULL,
  checkpoint INTEGER NOT NULL,
  text VARCHAR COLLATE "C" NOT NULL,
  created TIMESTAMP WITH TIME ZONE NOT NULL,
  who VARCHAR COLLATE "C" NOT NULL,
  document_url VARCHAR COLLATE "C",
  CONSTRAINT pk_note PRIMARY KEY (id),
  CONSTRAINT fk_note_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE CASCADE
);
CREATE INDEX ix_note_checkpoint ON note (checkpoint);
CREATE TABLE tag (
  checkpoint INTEGER NOT NULL,
  name VARCHAR COLLATE "C" NOT NULL,
  created TIMESTAMP WITH TIME ZONE NOT NULL,
  who VARCHAR COLLATE "C" NOT NULL,
  permanent BOOLEAN DEFAULT false NOT NULL,
  document_url VARCHAR COLLATE "C",
  CONSTRAINT pk_tag PRIMARY KEY (checkpoint, name),
  CONSTRAINT fk_tag_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE CASCADE
);
CREATE INDEX ix_tag_name ON tag (name);
CREATE TABLE untag (
  checkpoint INTEGER NOT NULL,
  name VARCHAR COLLATE "C" NOT NULL,
  removed TIMESTAMP WITH TIME ZONE NOT NULL,
  who VARCHAR COLLATE "C" NOT NULL,
  reason VARCHAR COLLATE "C" NOT NULL,
  document_url VARCHAR COLLATE "C",
  CONSTRAINT pk_untag PRIMARY KEY (checkpoint, name),
  CONSTRAINT fk_untag_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE CASCADE
);
CREATE TABLE verification (
  id SERIAL NOT NULL,
  checkpoint INTEGER NOT NULL,
  url VARCHAR COLLATE "C" NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  ok BOOLEAN NOT NULL,
  bytes_verified BIGINT NOT NULL,
  bytes_unverified BIGINT NOT NULL,
  problems JSONB NOT NULL,
  tool VARCHAR COLLATE "C" NOT NULL,
  CONSTRAINT pk_verification PRIMARY KEY (id),
  CONSTRAINT fk_verification_checkpoint_checkpoint FOREIGN KEY(checkpoint) REFERENCES checkpoint (serial) ON DELETE CASCADE
);
CREATE INDEX ix_verification_checkpoint ON verification (checkpoint);
