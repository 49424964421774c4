"""Tasks for lm-evaluation-harness: `lm_eval --include_path $(lpes-bake tasks-dir) --tasks lpes_kv_75`."""
