"""An HTTP server with OpenAI's and Anthropic's APIs; `pip install 'jaxkv[serve]'`.

One thread owns the `LLM` (`engine_thread`). Everything else runs on the event loop: a route reads the body (`fields` and the
two `*_fields`), `limits` lets it in, and a reply is written from what the engine thread hands over (`*_replies`,
`*_stream`).
"""
