// The tools that the page offers to the model. They run here, in the browser.

import { evaluate } from "./calculator.js";
import { figures } from "./live.js";

const TOOLS = {
  calculator: {
    description: "Computes an expression with + - * / and brackets.",
    properties: { expression: { type: "string" } },
    run: ({ expression }) => ({ result: evaluate(expression) }),
  },
  cluster_status: { description: "Reads the current figures of the cluster.", properties: {}, run: figures },
};

/** The tools in the API's format. */
export const definitions = Object.entries(TOOLS).map(([name, { description, properties }]) => {
  const parameters = { type: "object", properties, required: Object.keys(properties) };
  return { type: "function", function: { name, description, parameters } };
});

/** Run a call of the model; what is wrong with it is a result too. */
export function resultOf({ name, arguments: sent }) {
  if (!Object.hasOwn(TOOLS, name)) return { error: `there is no tool ${name}` };
  try {
    return TOOLS[name].run(JSON.parse(sent || "{}"));
  } catch (error) {
    return { error: error.message };
  }
}

/** A flat object as JSON with spaces, as models have seen it and as lines break. */
export function asJson(object) {
  const fields = Object.entries(object).map(([name, value]) => `${JSON.stringify(name)}: ${JSON.stringify(value)}`);
  return `{${fields.join(", ")}}`;
}
