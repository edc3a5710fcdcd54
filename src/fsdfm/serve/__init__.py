"""A server for few-step text: OpenAI's completions, infill, repair, streamed states, and a page.

Reading order: config (limits), engine (many texts, one thread), schemas (what is asked and answered), work (from a body
to jobs, from results to answers), guard (what stands before every request), app (the endpoints), server (the process),
page (the playground).

It needs the extra `serve`: pip install 'fsdfm[serve]'.
"""
