// The tools that the page offers to the model. They run here, in the browser.

import { figures } from "./live.js";

const DECIMALS = 4;
const OPERATORS = {
  "+": (a, b) => a + b,
  "-": (a, b) => a - b,
  "*": (a, b) => a * b,
  "/": (a, b) => a / b,
};

const TOOLS = {
  calculator: {
    description: "Computes with two numbers.",
    properties: {
      a: { type: "number" },
      operator: { type: "string", enum: Object.keys(OPERATORS) },
      b: { type: "number" },
    },
    run: calculate,
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

function calculate({ a, operator, b }) {
  if (typeof a !== "number" || typeof b !== "number") throw new Error("a and b must be numbers");
  if (!Object.hasOwn(OPERATORS, operator)) throw new Error(`there is no operator ${operator}`);
  if (operator === "/" && b === 0) throw new Error("division by zero");
  return { result: Number(OPERATORS[operator](a, b).toFixed(DECIMALS)) };
}
