"""Programs that call the server as a user of one client library does, and print what they got as JSON.

They know nothing of Pagoda but its URL and the demo model's name, and import nothing of the tests.
"""
